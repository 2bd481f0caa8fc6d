# Everything a machine with Python 3.11, pip and make needs; each target works alone and installs what it misses.
PYTHON ?= $(shell command -v python3.11 || command -v python3 || command -v python)
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
SHELL  := /bin/bash
export OMP_NUM_THREADS ?= 1
export PIP_DISABLE_PIP_VERSION_CHECK ?= 1
unexport PYTHONDONTWRITEBYTECODE  # or hundreds of processes under test compile hasten anew, a second each

.DEFAULT_GOAL := help
.PHONY: help train docs test test-all test-exhaustive test-slurm test-kubernetes test-megatron test-ray test-streams test-xla test-survive test-oldest test-newest check format lint types layers unit names mutants laws parity newest-ready parity-newest parity-suites dist bench bench-cuda bench-survive bench-ledger clean

help: ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

# The stamp is newer than what it was made from: a second call installs nothing.
$(READY): pyproject.toml constraints.txt dropin/pyproject.toml dropin/setup.cfg
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "hasten needs Python 3.11 or newer, found: $$($(PYTHON) --version). Set PYTHON=/path/to/python3.11."; exit 1; }
	@test -x $(BIN)/python || { echo "creating $(VENV)"; $(PYTHON) -m venv $(VENV); }
	@echo "installing hasten and its tools into $(VENV) (the first time takes minutes, torch is large)"
	@$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev,clients,docs]' --editable ./dropin
	@rm -rf .mypy_cache  # it remembers packages as missing that are there now
	@touch $@

train: $(READY) ## train the digits example on two CPU processes
	$(BIN)/hasten launch --cpu --num_processes 2 examples/digits.py

docs: $(READY) ## build the documentation site into build/site; a warning or a broken link is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

# Tests that watch the clock have the processors to themselves, the others share them. $(1) chooses, $(2) are options.
suite = status=0; \
	$(BIN)/python -m pytest $(2) -m '$(1)not timed' -n 2 --dist loadfile || status=$$?; \
	$(BIN)/python -m pytest $(2) -m '$(1)timed' $$(grep -rl --include='test_*.py' mark.timed tests) || status=$$?; \
	exit $$status

test: $(READY) ## run the test suite: every law on a small world, about twenty minutes on two cores
	@$(call suite,not exhaustive and )

test-all: $(READY) ## run the suite with its exhaustive tests, the real SLURM, 1000 random cases and torch_xla: four hours
	@$(MAKE) --no-print-directory --keep-going test-exhaustive laws test-xla

test-exhaustive: $(READY) # the first part of test-all
	@export HASTEN_TEST_SLURM=1 HASTEN_LONG_TESTS=1; $(call suite,,-o faulthandler_timeout=0)

test-megatron: $(READY) ## run the laws of Megatron-LM on a real megatron-core, through a stand-in for CUDA's calls: minutes
	$(BIN)/python -m pip install --quiet --constraint constraints.txt 'megatron-core>=0.16,<0.17'
	$(BIN)/python -m pytest -o faulthandler_timeout=0 tests/extensions/megatron/test_megatron_laws.py

# Its packages are in a folder of their own, on top of those of $(VENV): ray brings versions that others do not want.
test-ray: $(READY) ## run training and sweeps on a real Ray and a real Optuna, with workers and machines that are lost: minutes
	@test -x .ray/bin/python || $(PYTHON) -m venv .ray
	@$(BIN)/python -c 'import sysconfig; print("import site; site.addsitedir(%r)" % sysconfig.get_paths()["purelib"])' > \
		"$$(.ray/bin/python -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')/base.pth"
	@.ray/bin/python -m pip install --quiet --constraint constraints.txt 'ray[default,train,tune]>=2.60,<2.61' 'optuna>=4.5'
	PATH=$(CURDIR)/.ray/bin:$$PATH .ray/bin/python -m pytest -o faulthandler_timeout=0 tests/on_ray

# On top of the packages of $(VENV) as well: mosaicml-streaming wants an older numpy and an older transformers.
test-streams: $(READY) ## run the laws of streams on a real WebDataset, litdata and mosaicml-streaming: minutes
	@test -x .streams/bin/python || $(PYTHON) -m venv .streams
	@$(BIN)/python -c 'import sysconfig; print("import site; site.addsitedir(%r)" % sysconfig.get_paths()["purelib"])' > \
		"$$(.streams/bin/python -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')/base.pth"
	@grep -E '^(torch|torchvision)==' constraints.txt > .streams/constraints.txt
	@.streams/bin/python -m pip install --quiet --constraint .streams/constraints.txt 'mosaicml-streaming>=0.13,<0.14' 'litdata>=0.2.76,<0.3' \
		'webdataset>=1.0,<2' 'numpy<2.2'
	.streams/bin/python -m pytest -o faulthandler_timeout=0 tests/dist/data/test_data_other_packages.py

# XLA_WHEELS names a folder with the wheels of torch and torch_xla, if they are not to be downloaded.
test-xla: ## run the laws of strategy='xla' on a real torch_xla, on one device and on four virtual ones: minutes
	@$(PYTHON) tests/xla/environment.py .torch-xla $(XLA_WHEELS); code=$$?; if [ $$code = 3 ]; then exit 0; else exit $$code; fi
	@test ! -e .torch-xla/.ready || for count in 1 4; do echo "== $$count device(s)"; \
		PJRT_DEVICE=CPU CPU_NUM_DEVICES=$$count .torch-xla/bin/python -m pytest -o faulthandler_timeout=0 tests/xla || exit 1; done

# TORCHFT_WHEELS names a folder with the wheel of torchft, if it is not to be downloaded.
test-survive: ## run replicas that are killed and stopped while they train, on a real torchft: ten minutes
	@$(PYTHON) tests/survive/environment.py .torch-ft $(TORCHFT_WHEELS); code=$$?; if [ $$code = 3 ]; then exit 0; else exit $$code; fi
	@test ! -e .torch-ft/.ready || .torch-ft/bin/python -m pytest -o faulthandler_timeout=0 tests/survive

test-slurm: $(READY) ## run training jobs under a real two-node SLURM (packages slurm-wlm and munge, as root)
	HASTEN_TEST_SLURM=1 $(BIN)/python -m pytest tests/dist/launch/test_launch_slurm.py

# A folder of its own: the schemas of all versions of Kubernetes take 300 MB.
SCHEMAS := .kubernetes-schemas
test-kubernetes: $(READY) ## check manifests and the dashboard against the schemas of Kubernetes, JobSet, Kubeflow and Grafana
	@test -e $(SCHEMAS)/.ready || { $(BIN)/python -m pip install --quiet --constraint constraints.txt --target $(SCHEMAS) \
		kubernetes-validate kubeflow-trainer-api grafana-foundation-sdk && touch $(SCHEMAS)/.ready; }
	PYTHONPATH=$(SCHEMAS) $(BIN)/python -m pytest tests/extensions/kubernetes tests/extensions/metrics/test_prometheus.py

check: ## format, lint, types, layers, the documentation site, arch and unit tests
	@$(MAKE) --no-print-directory --jobs 2 --output-sync=target format lint types layers docs unit

format: $(READY)
	$(BIN)/ruff format --check .

lint: $(READY)
	$(BIN)/ruff check .

types: $(READY)
	$(BIN)/mypy

layers: $(READY)
	$(BIN)/lint-imports --no-logo

unit: $(READY)
	$(BIN)/python -m pytest -q -m 'not slow and not exhaustive' tests/arch tests/unit

names: $(READY) ## accept the present public names into the snapshot
	$(BIN)/python tests/arch/test_public_names.py

COUNT ?= 300
mutants: $(READY) ## change one token at a time in the modules that decide, and count what unit tests catch: COUNT=300 SEED=0 ROOM=data
	$(BIN)/python -m tests.mutants.run --count $(COUNT) --seed $(or $(SEED),0) --share 0.95 $(addprefix --room ,$(ROOM))

CASES ?= 1000
START ?= 0
laws: $(READY) ## search for cases that break the laws: CASES=1000 START=0, or one case by SEED=17
	@status=0; for script in tests/laws/test_*.py; do echo "== $$script"; \
		$(BIN)/python $$script --start $(START) --cases $(CASES) $(if $(SEED),--seed $(SEED)) || status=1; done; exit $$status

PARITY := .parity
PARITY_PACKAGES := torch transformers peft trl sentence-transformers datasets evaluate diffusers scikit-learn tensorboard pillow \
	torchdata bitsandbytes torchao
parity: $(READY) ## record scripts, clients, tutorials under the original package and the drop-in, and compare: CLIENTS="parity lora"
	@test -x $(PARITY)/bin/python || $(PYTHON) -m venv $(PARITY)
	@$(PARITY)/bin/python -m pip install --quiet --constraint constraints.txt \
		$(PARITY_PACKAGES) accelerate==1.15.0
	$(BIN)/python dropin/tests/record.py runs/parity --original $(PARITY)/bin/python --dropin $(BIN)/python \
		--apart $(PARITY)/clients $(if $(CLIENTS),--only $(CLIENTS))

# The newest releases of the clients on the pinned torch, in two environments that differ in the accelerate package only.
NEWEST := .parity-newest
newest-ready:
	@mkdir -p $(NEWEST)
	@grep -E '^(torch|torchao|torchdata|torchvision|bitsandbytes|numpy|setuptools)==' constraints.txt > $(NEWEST)/constraints.txt
	@for side in original dropin; do test -x $(NEWEST)/$$side/bin/python || $(PYTHON) -m venv $(NEWEST)/$$side; done
	@$(NEWEST)/original/bin/python -m pip install --quiet --upgrade --constraint $(NEWEST)/constraints.txt \
		$(PARITY_PACKAGES) accelerate==1.15.0
	@$(NEWEST)/dropin/bin/python -m pip install --quiet --upgrade --constraint $(NEWEST)/constraints.txt \
		$(PARITY_PACKAGES) --editable . --editable ./dropin

parity-newest: newest-ready ## the same with the newest releases of the clients, which dropin/CLIENTS.md shows in a column: CLIENTS="trainer lora"
	@rm -rf $(NEWEST)/clients
	$(NEWEST)/dropin/bin/python dropin/tests/record.py runs/parity-newest --original $(NEWEST)/original/bin/python \
		--dropin $(NEWEST)/dropin/bin/python --apart $(NEWEST)/clients --constraint $(NEWEST)/constraints.txt \
		--page dropin/CLIENTS.md $(if $(CLIENTS),--only $(CLIENTS))

# pip would replace the drop-in by the original for clients that want its extras, so these come without dependencies.
parity-suites: newest-ready ## run the clients' own tests and the original's scripts under both packages: SUITES="peft setfit" ADDED=folder, hours
	@for side in original dropin; do $(NEWEST)/$$side/bin/python -m pip install --quiet --upgrade --constraint $(NEWEST)/constraints.txt \
		pytest pytest-timeout parameterized scipy && $(NEWEST)/$$side/bin/python -m pip install --quiet --upgrade --no-deps \
		setfit pytorch-accelerated || exit 1; done
	$(NEWEST)/dropin/bin/python dropin/tests/run_suites.py runs/parity-suites --original $(NEWEST)/original/bin/python \
		--dropin $(NEWEST)/dropin/bin/python --page dropin/CLIENTS.md $(if $(SUITES),--only $(SUITES)) $(if $(ADDED),--added $(ADDED))

# The suite against another torch, in an environment of its own. OLDEST is the lower bound in pyproject.toml.
OLDEST := 2.11.0
test-oldest: ## run the suite against the oldest supported torch
	@test -x .torch-oldest/bin/python || $(PYTHON) -m venv .torch-oldest
	@grep -vE '^(torch|setuptools)==' constraints.txt > .torch-oldest/constraints.txt
	@.torch-oldest/bin/python -m pip install --quiet --constraint .torch-oldest/constraints.txt 'torch==$(OLDEST)' \
		--editable '.[dev,clients,docs]' --editable ./dropin
	.torch-oldest/bin/python -m pytest -m 'not exhaustive'

test-newest: ## run the suite against the newest torch there is
	@test -x .torch-newest/bin/python || $(PYTHON) -m venv .torch-newest
	@grep -vE '^(torch|setuptools)==' constraints.txt > .torch-newest/constraints.txt
	@.torch-newest/bin/python -m pip install --quiet --upgrade --constraint .torch-newest/constraints.txt torch
	@.torch-newest/bin/python -m pip install --quiet --constraint .torch-newest/constraints.txt \
		--editable '.[dev,clients,docs]' --editable ./dropin
	.torch-newest/bin/python -m pytest -m 'not exhaustive'

dist: $(READY) ## build sdist and wheel of both distributions, check them, and train with the wheels in an empty environment
	@rm -rf dist
	@$(BIN)/python -m pip install --quiet --constraint constraints.txt build twine
	$(BIN)/python -m build --outdir dist .
	$(BIN)/python -m build --outdir dist dropin
	$(BIN)/python -m twine check --strict dist/*
	$(BIN)/python tests/release/try_wheels.py dist constraints.txt

bench: $(READY) ## run the benchmarks and write one table
	$(BIN)/python benchmarks/run_all.py

bench-cuda: $(READY) ## measure every published table on one GPU, ten minutes, and write the pages
	$(BIN)/python benchmarks/run_all.py --cuda
	$(BIN)/python benchmarks/published.py --write
	$(BIN)/python benchmarks/headline.py

# As root, for its network namespaces. A second call continues; FAULTS=20 makes a short run.
bench-survive: ## inject 200 faults into replicas in every phase, beside restarts and torchft; write the result: an hour
	@$(PYTHON) tests/survive/environment.py .torch-ft $(TORCHFT_WHEELS); code=$$?; if [ $$code = 3 ]; then exit 0; else exit $$code; fi
	@test ! -e .torch-ft/.ready || .torch-ft/bin/python benchmarks/survive_kills.py --faults $(or $(FAULTS),200) --seed $(or $(SEED),0)

bench-ledger: $(READY) ## list every published number: its benchmark, commit and machine, and what has changed since
	@$(BIN)/python benchmarks/published.py

clean: ## remove the environment, caches and runs
	rm -rf $(VENV) $(PARITY) .ray .streams .torch-oldest .torch-newest .torch-xla .torch-ft $(SCHEMAS) runs .pytest_cache .mypy_cache .ruff_cache .import_linter_cache build dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
