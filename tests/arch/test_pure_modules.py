"""Modules that decide without torch: the command line, launchers, settings, trackers, and every file named `*_plan.py` or `config.py`."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Final

import grimp
import pytest

import hasten

PACKAGE: Final = Path(hasten.__file__).parent
PURE_FOLDERS: Final = ("cli", "config", "launch", "tracking")
PURE_FILES: Final = MappingProxyType(
    {
        "checkpoint.format.manifest": "`hasten checkpoint` reads manifests on machines without torch",
        "data.position": "a loader's position is saved and checked as plain values",
        "errors": "imported by everything",
        "optional": "imported by everything",
        "extensions.metrics.catalogue": "names and meanings of metrics",
        "extensions.survive.crew": "supervises processes",
        "extensions.survive.launch_target": "plans and supervises processes",
        "extensions.survive.replica_machines": "part of the supervision of several machines",
        "extensions.survive.replica_processes": "part of the supervision of processes",
        "runtime.affinity": "a rank's cores, from /sys and its local rank",
        "extensions.megatron.families": "sizes of a model, read from its Hub configuration",
        "extensions.setup.machine": "the machine, described for the commands that need no torch",
        "extensions.selfcheck.matrix": "starts and compares runs; each run imports torch in its own process",
        "extensions.setup.wizard": "questions of `hasten config`, which needs no torch",
        "extensions.trainer.arguments": "a Trainer's settings",
        "extensions.trainer.state": "a Trainer's counters and requests",
    }
)
NEEDS_TORCH: Final = MappingProxyType(
    {
        "launch.elastic.agent": "runs torch's elastic agent, in the process that supervises workers; plans do not import it",
        "launch.elastic.handler": "torch's elastic rendezvous over a store of ours, imported by launch.elastic.agent alone",
        "launch.elastic.torch_agent": "the seam to torch's elastic agent, imported by launch.elastic.agent alone",
        "launch.elastic.rendezvous": "part of the agent: the meeting of a job's hosts",
    }
)
LAZY: Final = "hasten.lazy"
"""The module through which others export names that are imported on first use."""


def is_pure(module: str) -> bool:
    """Say whether a module, named without the package, must not import torch."""
    folder, name = module.partition(".")[0], module.rpartition(".")[2]
    by_name = folder in PURE_FOLDERS or name.endswith("_plan") or name == "config"
    return (by_name or module in PURE_FILES) and module not in NEEDS_TORCH


def modules() -> list[str]:
    """Return the dotted names, without the package's, of all files that hold something."""
    files = (
        file for file in sorted(PACKAGE.rglob("*.py")) if file.name != "__init__.py"
    )
    return [".".join(file.relative_to(PACKAGE).with_suffix("").parts) for file in files]


@cache  # read by several tests, changed by none
def imports() -> grimp.ImportGraph:
    """Return all imports of hasten, those inside functions and of type checkers too, but for lazy public names."""
    graph = grimp.build_graph("hasten", include_external_packages=True, cache_dir=None)
    for importer in graph.find_modules_that_directly_import(LAZY):
        for imported in graph.find_modules_directly_imported_by(importer):
            graph.remove_import(importer=importer, imported=imported)
    return graph


def chains_to_torch(graph: grimp.ImportGraph, names: Iterable[str]) -> list[str]:
    """Return the shortest chain of imports from each module to torch, where there is one."""
    chains = (
        graph.find_shortest_chain(importer=name, imported="torch") for name in names
    )
    return [" -> ".join(chain) for chain in chains if chain]


def test_pure_modules_import_no_torch() -> None:
    names = [f"hasten.{module}" for module in modules() if is_pure(module)]
    assert len(names) > 70
    assert chains_to_torch(imports(), names) == []


def test_a_chain_of_imports_is_found() -> None:
    graph = grimp.ImportGraph()
    for importer, imported in (
        ("a_plan", "b"),
        ("b", "c"),
        ("c", "torch"),
        ("d", "b"),
        ("e", "f"),
    ):
        graph.add_import(importer=importer, imported=imported)
    assert chains_to_torch(graph, ["a_plan", "e"]) == ["a_plan -> b -> c -> torch"]


@pytest.mark.parametrize("module", sorted(NEEDS_TORCH))
def test_exceptions_import_torch(module: str) -> None:
    assert chains_to_torch(imports(), [f"hasten.{module}"]), (
        f"{module} needs no torch: remove it from NEEDS_TORCH"
    )


def test_listed_modules_exist_and_are_not_named_by_the_pattern() -> None:
    module_names = modules()
    assert [
        name for name in (*PURE_FILES, *NEEDS_TORCH) if name not in module_names
    ] == []
    assert [
        name
        for name in PURE_FILES
        if name.endswith("_plan") or name.partition(".")[0] in PURE_FOLDERS
    ] == []
