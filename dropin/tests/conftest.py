"""Fixtures of the drop-in's tests: fresh states, and one warm process with a fabricated Hub cache for scripts."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Generator, Iterator
from importlib import util
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

TESTS_FOLDER = Path(__file__).parent


def load(name: str) -> ModuleType:
    """A file beside this one as a module."""
    spec = util.spec_from_file_location(f"dropin_{name}", TESTS_FOLDER / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def fresh_states() -> Iterator[None]:
    """The process-wide states of the package as in a new process, before and after a test."""
    from accelerate.state import AcceleratorState, GradientState
    from hasten.runtime import mesh

    for last in (False, True):
        AcceleratorState._reset_state(True)
        GradientState._reset_state()
        if not last:
            yield
    # sharding starts a group of one process, which a later test would take for its own
    mesh.destroy_groups()
    # ends the persistent workers of loaders; a full collection visits every object of transformers
    gc.collect(1)


@pytest.fixture(scope="session")
def parity() -> ModuleType:
    """How results are compared with recorded ones."""
    return load("run_parity")


@pytest.fixture(scope="session")
def offline(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of every script: the CPU, and a Hub cache instead of a network."""
    return {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "HF_HOME": str(tmp_path_factory.mktemp("hub")),
        "HF_HUB_OFFLINE": "1",
        "HF_EVALUATE_OFFLINE": "1",
        "ACCELERATE_USE_CPU": "1",
    }


@pytest.fixture(scope="session")
def warm(
    tmp_path_factory: pytest.TempPathFactory, offline: dict[str, str]
) -> Generator[Any]:
    """A process that has imported the libraries, and filled the Hub cache where they are installed."""
    folder = tmp_path_factory.mktemp("warm")
    warm_process = load("warm").Warm(sys.executable, offline, folder / "log")
    if util.find_spec("transformers"):
        hub_run = warm_process.run(
            folder,
            [str(TESTS_FOLDER / "tutorials" / "make_hub.py"), offline["HF_HOME"]],
        )
        assert not hub_run.failed, hub_run.err
    yield warm_process
    warm_process.close()
