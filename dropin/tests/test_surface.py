"""Every public name of Accelerate 1.15 works here, or is left out with a reason."""

from __future__ import annotations

import importlib
import importlib.util
import json
import pickle
import subprocess
import sys
import textwrap
import tomllib
from pathlib import Path
from types import ModuleType
from typing import get_type_hints

import pytest
from packaging.version import Version
from torch.utils.data import DataLoader

import accelerate

TESTS_FOLDER = Path(__file__).parent


def _surface() -> ModuleType:
    spec = importlib.util.spec_from_file_location(
        "surface", TESTS_FOLDER / "surface.py"
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.filterwarnings("ignore")
def test_no_name_is_missing_and_the_table_is_committed() -> None:
    surface = _surface()
    states = surface.table()
    missing = [
        f"{module}.{name}"
        for module, module_states in states.items()
        for name, state in module_states.items()
        if state == "missing"
    ]
    assert missing == []
    assert (TESTS_FOLDER.parent / "SURFACE.md").read_text() == surface.render(states), (
        "run `python dropin/tests/surface.py write`"
    )


@pytest.mark.filterwarnings("ignore")
def test_every_name_of_every_module_resolves_or_has_a_reason() -> None:
    """`dir()` of each module of the original, private names and imported ones too."""
    surface = _surface()
    names = json.loads(surface.EVERY_NAME.read_text())
    assert len(names) > 75 and sum(map(len, names.values())) > 2_400
    left = surface.unresolved()
    assert [name for name, why in left.items() if not why] == []
    assert len(left) < 310
    shown = set(dir(importlib.import_module("accelerate.accelerator")))
    assert {"DataLoaderConfiguration", "is_npu_available", "os"} <= shown
    with pytest.raises(AttributeError, match="has no attribute 'nothing_of_that_name'"):
        importlib.import_module("accelerate.accelerator").nothing_of_that_name  # noqa: B018  the lookup is the test


_LONGER = (
    "test_sync",
    "test_script",
    "external_deps.test_metrics",
    "test_distributed_data_loop",
    "test_merge_weights",
)


@pytest.mark.parametrize(
    "script",
    [
        "test_ops",
        *(pytest.param(name, marks=pytest.mark.exhaustive) for name in _LONGER),
    ],
)
def test_checks_that_client_suites_import_pass_here(script: str) -> None:
    """As the original's users run them: `debug_launcher(test_ops.main)`; each raises where a process sees anything wrong."""
    from accelerate import debug_launcher

    debug_launcher(
        importlib.import_module(f"accelerate.test_utils.scripts.{script}").main,
        num_processes=2,
    )


@pytest.mark.parametrize("package", ["accelerate.utils", "accelerate.test_utils"])
def test_packages_show_what_their_modules_have(package: str) -> None:
    """Whichever module a name is found in, it is the one that the original's module of that name has."""
    names = json.loads((TESTS_FOLDER / "golden" / "names.json").read_text())
    shown = importlib.import_module(package)
    homes = [
        (home, name)
        for home in names
        if home.rpartition(".")[0] == package
        for name in names[home]
    ]
    shared_names = [
        (importlib.import_module(home), name)
        for home, name in homes
        if name in names[package]
    ]
    assert len(shared_names) > 40
    assert [
        name
        for home, name in shared_names
        if getattr(shown, name) is not getattr(home, name)
    ] == []
    assert {name for _, name in shared_names} - set(shown.__all__) == set()
    space: dict[str, object] = {}
    # names of modules stay the standard library's
    exec(f"from {package} import *", space)
    assert {name for _, name in shared_names} <= space.keys() and "random" not in space


def test_what_is_left_out_says_why() -> None:
    from accelerate.utils.megatron_lm import GPTTrainStep, initialize

    with pytest.raises(
        NotImplementedError, match=r"left out .* trains GPT-2 and Llama"
    ):
        initialize(None)
    with pytest.raises(NotImplementedError, match=r"utils\.GPTTrainStep is left out"):
        GPTTrainStep(None, None)


def test_importing_the_face_is_cheap() -> None:
    code = (
        "import sys, accelerate; print('torch' in sys.modules, accelerate.__version__)"
    )
    printed_words = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.split()
    assert printed_words == ["False", "1.15.0"]


def test_the_version_passes_the_upper_bounds_of_clients() -> None:
    settings = tomllib.loads((TESTS_FOLDER.parent / "pyproject.toml").read_text())
    version = settings["project"]["version"]
    assert version == accelerate.__version__
    assert Version("1.3.0") <= Version(version) <= Version("1.15.0")
    assert accelerate.__implementation__ == "hasten"


def test_the_original_beside_it_is_refused(tmp_path: Path) -> None:
    info = tmp_path / "accelerate-1.15.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: accelerate\nVersion: 1.15.0\n"
    )
    code = textwrap.dedent(
        f"""
        import sys
        sys.path.append({str(tmp_path)!r})
        try:
            import accelerate
        except ImportError as error:
            print("pip uninstall accelerate" in str(error), "1.15.0" in str(error))
        """
    )
    printed_words = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.split()
    assert printed_words == ["True", "True"]


@pytest.mark.parametrize(
    "home",
    ["accelerate.utils.dataclasses", "accelerate.data_loader", "accelerate.state"],
)
def test_classes_live_where_the_original_has_them(home: str) -> None:
    """Pickled objects are found by either package, whichever file defines their class here."""
    module = importlib.import_module(home)
    names = json.loads((TESTS_FOLDER / "golden" / "names.json").read_text())[home]
    classes = [
        value for name in names if isinstance(value := getattr(module, name), type)
    ]
    assert len(classes) > 3
    assert [home_class for home_class in classes if home_class.__module__ != home] == []
    assert pickle.loads(pickle.dumps(classes)) == classes
    for home_class in classes:
        # torch's own annotations cannot be resolved
        if not issubclass(home_class, DataLoader):
            get_type_hints(home_class)
