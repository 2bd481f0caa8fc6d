"""The torch-free contract is complete: every room and file that decides is in it, and exceptions have a reason."""

from __future__ import annotations

import tomllib
from pathlib import Path
from types import MappingProxyType
from typing import Final

import hasten

PACKAGE: Final = Path(hasten.__file__).parent
REPOSITORY: Final = Path(__file__).parents[2]

# What decides rather than does, by room or file; a name that does not exist yet is ready for the day it does.
PURE: Final = (
    *("errors", "optional", "config", "launch", "cli", "tracking"),
    *("runtime.env", "runtime.topology", "runtime.axes", "runtime.affinity", "runtime.nodelist"),
    *("data.plan", "data.shuffle", "data.position", "checkpoint.manifest", "checkpoint.retention"),
    *("bigmodel.solver", "strategies.pipeline_split", "strategies.deepspeed_config"),
    *("strategies.megatron_config", "strategies.megatron_families", "strategies.megatron_layout"),
    *("planner.hardware", "planner.memory", "planner.traffic", "planner.search", "planner.report"),
    *("planner.candidate", "planner.speed", "planner.traced", "planner.tuning", "planner.failures"),
)
NEEDS_TORCH: Final = MappingProxyType(
    {
        "launch.elastic.agent": "runs torch's elastic agent, in the process that supervises workers; plans do not import it",
        "launch.elastic.handler": "torch's elastic rendezvous over a store of ours, imported by launch.elastic.agent alone",
        "launch.elastic.torch_agent": "the seam to torch's elastic agent, imported by launch.elastic.agent alone",
        "launch.rendezvous": "part of the agent: where the hosts of a job meet",
        "launch.selfcheck": "the program of `hasten test`, launched like any training script; imported by nobody",
        "launch.task": "the first code of a rank under srun, mpirun or jsrun; started by name, imported by nobody",
    }
)


def modules() -> list[str]:
    """Return the dotted names, without the package's, of all files that hold something."""
    files = (file for file in sorted(PACKAGE.rglob("*.py")) if file.name != "__init__.py")
    return [".".join(file.relative_to(PACKAGE).with_suffix("").parts) for file in files]


def contract() -> list[str]:
    """Return the modules that the contract in pyproject.toml protects."""
    settings = tomllib.loads((REPOSITORY / "pyproject.toml").read_text("utf-8"))
    (found,) = (c for c in settings["tool"]["importlinter"]["contracts"] if c["id"] == "pure")
    return [name.removeprefix("hasten.") for name in found["source_modules"]]


def within(module: str, names: tuple[str, ...] | list[str]) -> bool:
    """Say whether a module is one of `names` or inside one of them."""
    return any(module == name or module.startswith(f"{name}.") for name in names)


def test_every_deciding_module_is_protected() -> None:
    protected = contract()
    bare = [m for m in modules() if within(m, PURE) and m not in NEEDS_TORCH and not within(m, protected)]
    assert not bare, f"add to source_modules of the contract `pure` in pyproject.toml: {bare}"


def test_exceptions_are_real() -> None:
    stale = [m for m in NEEDS_TORCH if m not in modules()]
    assert not stale, f"no longer there: {stale}"
