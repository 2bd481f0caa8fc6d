"""Run the test suites of clients, and the original's own scripts, under the original package and the drop-in, and compare.

python run_suites.py FOLDER --original PYTHON --dropin PYTHON [--only NAME …] [--added FOLDER] [--page FILE]

A suite is what the client's sdist has, and what `--added` puts into it. The Hub is a folder of tiny random models (suites_hub.py); a test
that needs more of it fails on both sides. Fails where a test passes with the original only and LISTED gives no reason. Logs and lists
are written to FOLDER.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final
from xml.etree import ElementTree

TESTS_FOLDER: Final = Path(__file__).parent
SIDES: Final = ("original", "dropin")
TEST_LIMIT_S: Final = 120
GROUP_LIMIT_S: Final = 3600.0
TOGETHER: Final = 12
SCRIPT_LIMIT_S: Final = 600.0
SCRIPTS: Final = "accelerate.test_utils.scripts"
TITLE: Final = "## Their own test suites"

# Clients, and the test files to run: all, or the ones named. peft has ten thousands of tests of layers: these are the files that build
# models on the meta device, place them, or train them.
SUITES: Final[dict[str, tuple[str, ...]]] = {
    "pytorch-accelerated": (),
    "sentence-transformers": (
        "test_cmnrl.py",
        "test_model_card_data.py",
        "test_trainer.py",
        "test_training_args.py",
    ),
    "setfit": (),
    "skorch": ("test_hf.py",),
    "transformers": (
        "test_modeling_utils.py",
        "test_trainer.py",
        "test_trainer_accelerator.py",
        "test_trainer_callback.py",
        "test_trainer_checkpointing.py",
        "test_trainer_data.py",
        "test_trainer_evaluation.py",
        "test_trainer_hyperparameter.py",
        "test_trainer_optimizers.py",
        "test_trainer_seq2seq.py",
    ),
    "diffusers": (),
    "trl": (
        "test_bco_trainer.py",
        "test_callbacks.py",
        "test_core.py",
        "test_cpo_trainer.py",
        "test_dpo_trainer.py",
        "test_gkd_trainer.py",
        "test_grpo_trainer.py",
        "test_iterative_sft_trainer.py",
        "test_kto_trainer.py",
        "test_modeling_value_head.py",
        "test_nash_md_trainer.py",
        "test_online_dpo_trainer.py",
        "test_orpo_trainer.py",
        "test_peft_models.py",
        "test_ppo_trainer.py",
        "test_prm_trainer.py",
        "test_reward_trainer.py",
        "test_rloo_trainer.py",
        "test_sft_trainer.py",
        "test_trainers_args.py",
        "test_utils.py",
        "test_xpo_trainer.py",
    ),
    "peft": (
        "test_cpt.py",
        "test_frod.py",
        "test_helpers.py",
        "test_lorafa.py",
        "test_low_level_api.py",
        "test_other.py",
        "test_pvera.py",
        "test_randlora.py",
        "test_shira.py",
        "test_vblora.py",
        "test_vera.py",
        "test_xlora.py",
    ),
}
# What a suite sees beside the environment, the client first. trl's and sentence-transformers' newest sdists have no tests of trainers: the
# last ones that do run with the transformers of their time.
OLD: Final = (
    "transformers==4.56.2",
    "huggingface-hub==0.35.3",
    "tokenizers==0.22.1",
    "datasets==4.1.1",
)
SUITE_EXTRAS: Final[dict[str, tuple[str, ...]]] = {
    "sentence-transformers": ("sentence-transformers==5.1.0", *OLD),
    "skorch": ("skorch==1.4.0", "tabulate"),
    "trl": ("trl==0.21.0", *OLD),
}
ENCODER: Final = '''"""Stand-ins for fixtures that the sdist leaves out: a tiny encoder, and pairs of sentences with a score."""

import pytest
from datasets import Dataset, DatasetDict
from sentence_transformers import SentenceTransformer, models


@pytest.fixture
def stsb_bert_tiny_model():
    encoder = models.Transformer("peft-internal-testing/tiny-random-BertModel")
    made = SentenceTransformer(modules=[encoder, models.Pooling(encoder.get_word_embedding_dimension())])
    made.model_card_data.generate_widget_examples = False
    return made


@pytest.fixture(scope="session")
def stsb_dataset_dict():
    rows = [{"sentence1": f"word{n % 80} a", "sentence2": f"word{n % 40} b", "score": n % 5 / 4} for n in range(1000)]
    return DatasetDict({split: Dataset.from_list(rows) for split in ("train", "validation", "test")})
'''
# Files that tests import and that their sdist leaves out. trl 0.21 trains in bf16, for which its transformers asks a GPU.
FOLDERS: Final = "from tempfile import TemporaryDirectory as SafeTemporaryDirectory\n"
ADDED: Final = {
    "sentence-transformers": {"tests/conftest.py": ENCODER, "tests/utils.py": FOLDERS},
    "setfit": {"tests/utils.py": FOLDERS},
    "trl": {
        "tests/conftest.py": "import transformers.training_args as args\n\nargs.is_torch_bf16_gpu_available = lambda: True\n"
    },
}
# Arguments of the original's scripts that need some, and what they are run with.
ARGUMENTS: Final[dict[str, list[str]]] = {}
# Tests that pass with the original only, "suite: test", with the reason.
LISTED: Final[dict[str, str]] = {}


@dataclass(frozen=True, slots=True)
class Job:
    """Test files, or a script, that run under both packages."""

    suite: str
    name: str
    folder: Path
    command: tuple[str, ...]
    """With the fields {python}, {bin} (its folder) and {report}."""
    limit_s: float
    apart: str = ""
    """The folder of what only this job sees."""


@dataclass(slots=True)
class Result:
    """Names of a suite's passed tests by side, and its version."""

    version: str
    passed: dict[str, set[str]] = field(
        default_factory=lambda: {side: set() for side in SIDES}
    )
    files: int = 0

    def only(self, side: str) -> list[str]:
        """Return the tests that passed on this side alone."""
        other_side = SIDES[1 - SIDES.index(side)]
        return sorted(self.passed[side] - self.passed[other_side])


def version_of(python: str, distribution: str) -> str:
    """Return the version of a distribution in another environment."""
    code = f"from importlib.metadata import version; print(version({distribution!r}))"
    return subprocess.run(
        [python, "-c", code], capture_output=True, text=True, check=True
    ).stdout.strip()


def unpacked(python: str, name: str, version: str, out: Path) -> Path:
    """Download and unpack the sdist of a release; return its folder."""
    unpack_folder = out / "sdists" / name
    if not unpack_folder.exists():
        fetch = [
            python,
            "-m",
            "pip",
            "download",
            "--quiet",
            "--no-deps",
            "--no-binary",
            name,
            "--dest",
        ]
        subprocess.run([*fetch, str(out / "sdists"), f"{name}=={version}"], check=True)
        [archive] = (out / "sdists").glob(
            f"{name.replace('-', '[-_]')}-{version}.tar.gz"
        )
        with tarfile.open(archive) as opened:
            opened.extractall(unpack_folder, filter="data")
    [folder] = unpack_folder.iterdir()
    return folder


def installed(python: str, suite: str, out: Path) -> str:
    """Install what the suite sees beside the environment; return its folder, or nothing."""
    extras_folder = out / "apart" / suite
    if suite not in SUITE_EXTRAS:
        return ""
    if not extras_folder.exists():
        fetch = [python, "-m", "pip", "install", "--quiet", "--no-deps", "--target"]
        subprocess.run([*fetch, str(extras_folder), *SUITE_EXTRAS[suite]], check=True)
    return str(extras_folder)


def suite_jobs(
    suite: str, folder: Path, added: Path | None = None, extras_folder: str = ""
) -> list[Job]:
    """Return jobs for the test files of an unpacked sdist, several files in each: most of their time is imports."""
    if added is not None and (added / suite).is_dir():
        shutil.copytree(added / suite, folder, dirs_exist_ok=True)
    files = []
    for tests in (
        tests_folder
        for tests_folder in (
            folder / "tests",
            folder / "test",
            folder / suite / "tests",
        )
        if tests_folder.is_dir()
    ):
        (tests / "__init__.py").touch()  # peft's and trl's sdists leave it out
        files += sorted(
            str(file.relative_to(folder)) for file in tests.rglob("test_*.py")
        )
    for name, content in ADDED.get(suite, {}).items():
        (folder / name).write_text(content)
    files = [
        name for name in files if not SUITES[suite] or Path(name).name in SUITES[suite]
    ]
    options = f"-q -p no:cacheprovider -o addopts= --timeout {TEST_LIMIT_S} --junitxml {{report}}".split()
    options.append("--continue-on-collection-errors")
    file_jobs = []
    for start in range(0, len(files), TOGETHER):
        group = files[start : start + TOGETHER]
        name = " ".join([group[0], *(Path(test_file).name for test_file in group[1:])])
        file_jobs.append(
            Job(
                suite,
                name,
                folder,
                ("{python}", "-m", "pytest", *group, *options),
                GROUP_LIMIT_S,
                extras_folder,
            )
        )
    return file_jobs


def script_jobs(original: str, out: Path) -> list[Job]:
    """Return the runs of copies of the original's scripts, on one and two processes, and of its command."""
    code = "from importlib.util import find_spec as f; print(f('accelerate').submodule_search_locations[0])"
    home = subprocess.run(
        [original, "-c", code], capture_output=True, text=True, check=True
    ).stdout.strip()
    folder = out / "scripts"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(Path(home, "test_utils", "scripts"), folder)
    script_runs = [
        Job(
            SCRIPTS,
            "accelerate test",
            folder,
            ("{bin}/accelerate", "test"),
            SCRIPT_LIMIT_S,
        )
    ]
    ways = {
        "1 process": ["{python}"],
        "2 processes": [
            "{python}",
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc_per_node",
            "2",
        ],
        "accelerate launch": ["{bin}/accelerate", "launch", "--cpu"],
    }
    for file in sorted(folder.rglob("test_*.py")):
        name = str(file.relative_to(folder))
        for launch_name, start in ways.items():
            command = (*start, name, *ARGUMENTS.get(name, ()))
            script_runs.append(
                Job(SCRIPTS, f"{name} ({launch_name})", folder, command, SCRIPT_LIMIT_S)
            )
    return script_runs


def passed(report: Path) -> set[str]:
    """Return the names of the tests that a report in JUnit's form calls passed."""
    if not report.exists():
        return set()
    return {
        re.sub(r"0x[0-9a-f]+", "0x", f"{case.get('classname')}::{case.get('name')}")
        for case in ElementTree.parse(report).iter("testcase")
        if all(case.find(kind) is None for kind in ("failure", "error", "skipped"))
    }


def run(job: Job, side: str, python: str, out: Path, home: Path) -> set[str]:
    """Run a job on one side; return the names of what passed."""
    log = out / side / job.suite / (re.sub(r"\W+", "_", job.name)[:80] + ".log")
    log.parent.mkdir(parents=True, exist_ok=True)
    report = log.with_suffix(".xml")
    report.unlink(missing_ok=True)
    fields = {"python": python, "bin": str(Path(python).parent), "report": str(report)}
    env = {
        **os.environ,
        "PATH": f"{fields['bin']}{os.pathsep}{os.environ['PATH']}",
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        # or the original takes several processes on the CPU for single ones
        "ACCELERATE_USE_CPU": "1",
        "HF_HUB_OFFLINE": "1",
        "HF_EVALUATE_OFFLINE": "1",
        "HF_HOME": str(home),
        "DISABLE_MLFLOW_INTEGRATION": "TRUE",
        **({"PYTHONPATH": job.apart} if job.apart else {}),
    }
    command = [word.format(**fields) for word in job.command]
    with log.open("w") as written:
        process = subprocess.Popen(
            command,
            cwd=job.folder,
            env=env,
            stdout=written,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = process.wait(job.limit_s)
        except subprocess.TimeoutExpired:
            written.write(f"\nstopped after {job.limit_s:.0f} s\n")
            code = -1
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    if job.suite == SCRIPTS:
        return {job.name} if code == 0 else set()
    return passed(report)


def run_all(
    jobs: Iterable[Job],
    results: Mapping[str, Result],
    sides: Mapping[str, str],
    out: Path,
    *,
    in_turn: bool,
) -> None:
    """Run jobs one after another, each on both sides at the same time, or on one side after the other."""
    with ThreadPoolExecutor(1 if in_turn else len(sides)) as pool:
        for job in jobs:
            started = time.monotonic()
            lists = pool.map(
                lambda side, job=job: run(
                    job, side, sides[side], out, out / side / "hub"
                ),
                SIDES,
            )
            passed_tests = dict(zip(SIDES, lists, strict=True))
            result = results[job.suite]
            result.files += 1
            for side in SIDES:
                result.passed[side] |= passed_tests[side]
                (out / side / f"{job.suite}.passed").write_text(
                    "\n".join(sorted(result.passed[side])) + "\n"
                )
            counts = ", ".join(f"{side} {len(passed_tests[side])}" for side in SIDES)
            print(
                f"{job.suite} {job.name}: {counts} passed, {time.monotonic() - started:.0f} s",
                flush=True,
            )
            for name in sorted(passed_tests["original"] - passed_tests["dropin"]):
                why = LISTED.get(f"{job.suite}: {name}", "NOT LISTED")
                print(f"  with the original only: {name} ({why})", flush=True)


def table(results: Mapping[str, Result]) -> list[str]:
    """Return one row for each suite, and below it the reasons of listed differences."""
    rows = [
        "| Suite | Version | Passed by the original | By the drop-in | By one only |",
        "|---|---|---|---|---|",
    ]
    reasons = []
    for suite, suite_result in results.items():
        if not suite_result.files:
            rows.append(
                f"| {suite} | {suite_result.version} | no tests in its sdist or wheel | – | – |"
            )
            continue
        only = {side: suite_result.only(side) for side in SIDES}
        one_sided = (
            ", ".join(f"{side} {len(names)}" for side, names in only.items() if names)
            or "none"
        )
        counts = " | ".join(str(len(suite_result.passed[side])) for side in SIDES)
        rows.append(f"| {suite} | {suite_result.version} | {counts} | {one_sided} |")
        for name in only["original"]:
            reasons.append(
                f"- {suite}, `{name}`: {LISTED.get(f'{suite}: {name}', 'no reason listed')}"
            )
    return rows + (["", *reasons] if reasons else [])


def with_section(page: str, lines: Iterable[str]) -> str:
    """Return the page with these lines as the table of its section `TITLE`; other words of the section stay."""
    preceding, title, remainder = page.partition(TITLE)
    words, mark, _ = remainder.partition("\n| Suite |")
    if not title:
        preceding, words = f"{page.rstrip()}\n\n", "\n"
    del mark
    return f"{preceding}{TITLE}{words.rstrip()}\n\n" + "\n".join(lines) + "\n"


def unlisted(results: Mapping[str, Result]) -> list[str]:
    """Return the tests that pass with the original only and have no reason."""
    names = [
        f"{suite}: {name}"
        for suite, suite_result in results.items()
        for name in suite_result.only("original")
    ]
    return [name for name in names if name not in LISTED]


def main() -> int:
    """Run, compare, report; 1 if a test passes with the original only and is not listed."""
    suite_names = [SCRIPTS, *SUITES]
    parser = argparse.ArgumentParser(
        description="Run clients' test suites under both packages and compare."
    )
    parser.add_argument("folder", type=Path, help="where sdists, logs and lists go")
    parser.add_argument(
        "--original", required=True, help="the Python that has the original package"
    )
    parser.add_argument(
        "--dropin", required=True, help="the Python that has the drop-in"
    )
    parser.add_argument(
        "--only",
        nargs="+",
        choices=suite_names,
        default=suite_names,
        help="suites to run instead of all",
    )
    parser.add_argument(
        "--files",
        help="only files and scripts whose name matches this regular expression",
    )
    parser.add_argument(
        "--added",
        type=Path,
        help="a folder with a folder for each client, whose files are copied over its unpacked sdist: the tests that the sdist leaves "
        "out, from a checkout of the client's repository at that release",
    )
    parser.add_argument(
        "--in-turn", action="store_true", help="run the two sides one after the other"
    )
    parser.add_argument(
        "--page", type=Path, help=f"a page whose section {TITLE[3:]!r} is updated"
    )
    args = parser.parse_args()
    sides = {
        "original": os.path.abspath(args.original),
        "dropin": os.path.abspath(args.dropin),
    }
    out, started = args.folder.absolute(), time.monotonic()
    if not (out / "hub").exists():
        print("making the stand-ins of the Hub's models", flush=True)
        subprocess.run(
            [
                sides["original"],
                str(TESTS_FOLDER / "suites_hub.py"),
                str(out / "hub.part"),
            ],
            check=True,
        )
        (out / "hub.part").rename(out / "hub")
    for side in SIDES:
        shutil.rmtree(out / side / "hub", ignore_errors=True)
        shutil.copytree(out / "hub", out / side / "hub")
    results, jobs = {}, []
    for suite in args.only:
        name = "accelerate" if suite == SCRIPTS else suite
        pinned = SUITE_EXTRAS.get(suite, ("",))[0].partition("==")[2]
        results[suite] = Result(pinned or version_of(sides["original"], name))
        if suite == SCRIPTS:
            jobs += script_jobs(sides["original"], out)
        else:
            folder = unpacked(sides["original"], name, results[suite].version, out)
            jobs += suite_jobs(
                suite, folder, args.added, installed(sides["original"], suite, out)
            )
    selected_jobs = [
        job for job in jobs if not args.files or re.search(args.files, job.name)
    ]
    run_all(selected_jobs, results, sides, out, in_turn=args.in_turn)
    table_lines = table(results)
    if args.page is not None:
        args.page.write_text(with_section(args.page.read_text(), table_lines))
    print(
        "\n".join(
            [
                "",
                *table_lines,
                "",
                f"{len(selected_jobs)} files and scripts in {time.monotonic() - started:.0f} s",
            ]
        )
    )
    return int(bool(unlisted(results)))


if __name__ == "__main__":
    sys.exit(main())
