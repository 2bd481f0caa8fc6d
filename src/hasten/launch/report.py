"""Check-in report of this machine: settings, code and package versions, as digests and values."""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import platform
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Final

from hasten.config.base import Section, default_of
from hasten.config.masking import masked_value
from hasten.config.root import Config
from hasten.launch.base import Host, LaunchPlan, Target
from hasten.launch.checkin import Report

_PACKAGES: Final = (
    "hasten",
    "torch",
    "numpy",
    "safetensors",
    "transformers",
    "accelerate",
    "deepspeed",
    "datasets",
    "torch_xla",
)
# Settings that may differ between machines.
_LOCAL: Final = frozenset(
    f"launch.{name}"
    for name in (
        *("machine_rank", "processes_per_machine", "gpu_ids", "num_cpu_threads_per_process", "log_dir", "tee", "quiet"),
        *(
            "num_processes",
            "num_machines",
            "nnodes",
            "main_process_ip",
            "main_process_port",
            "rdzv_endpoint",
            "rdzv_conf",
        ),
        *(
            "module",
            "no_python",
            "check_in",
            "max_restarts",
            "stop_grace_s",
            "monitor_interval",
            "enable_cpu_affinity",
            "multi_gpu",
        ),
    )
)
_MAX_FILES: Final = 500
CELL: Final = "hasten.launch.notebook"
"""The program that runs a notebook's function; its only argument is a folder."""
SOURCE: Final = "source.txt"
"""File with the function's source in that folder; machines compare their cells by it."""


def make_report(plan: LaunchPlan, config: Config, host: Host, *, alone: bool) -> Report:
    """Return this machine's report; without the digests on a single machine, which has nothing to compare with."""
    count = sum(proc.count for proc in plan.procs)
    device = f"cpu ({host.cores} cores)" if config.cpu else host.device_words
    if alone or plan.target is None:
        return Report(host=host.name, address="", num_processes=count, device=device)
    settings = dict(changed_settings(config))
    return Report(
        host=host.name,
        address="",
        num_processes=count,
        device=device,
        machine_rank=plan.meeting.machine_rank if plan.meeting else None,
        config=_digest(repr(sorted(settings.items())).encode()),
        code=code_digest(plan.target),
        program="the notebook's function" if plan.target.name == CELL else plan.target.name,
        versions=package_versions(),
        settings={name: str(masked_value(name, value)) for name, value in settings.items()},
    )


def changed_settings(section: Section, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield the dotted name and value of each non-default setting that must be the same on every machine."""
    for name in section.__dataclass_fields__:
        value, path = getattr(section, name), f"{prefix}{name}"
        if isinstance(value, Section):
            yield from changed_settings(value, f"{path}.")
        elif path not in _LOCAL and value != default_of(type(section), name):
            yield path, repr(value)


def package_versions() -> dict[str, str]:
    """Return the versions of packages that must match across machines, without importing them."""
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def code_digest(target: Target) -> str:
    """Return a digest of the program and of the files in its folder that it imports, directly or indirectly."""
    path = _program_file(target)
    if path is None:
        return ""
    seen: dict[Path, bytes] = {}
    todo = [path]
    while todo and len(seen) < _MAX_FILES:
        file = todo.pop()
        if file in seen:
            continue
        seen[file] = file.read_bytes()
        if file.suffix == ".py":
            todo += _local_imports(seen[file], path.parent)
    parts = (f"{file.relative_to(path.parent)}\0".encode() + text for file, text in sorted(seen.items()))
    return _digest(b"\0".join(parts))


def _program_file(target: Target) -> Path | None:
    if target.no_python:
        return None
    if target.module and target.name == CELL and target.args:
        return Path(target.args[0], SOURCE)
    if target.module:
        try:
            spec = importlib.util.find_spec(target.name)
        except (ImportError, ValueError):  # the workers report the full error
            return None
        return Path(spec.origin).resolve() if spec is not None and spec.origin else None
    path = Path(target.name)
    return path.resolve() if path.is_file() else None


def _local_imports(source: bytes, folder: Path) -> list[Path]:
    """Return the files under `folder` that a module imports."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):  # the workers report the full error
        return []
    names: list[str] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    found: list[Path] = []
    for name in names:
        base = folder.joinpath(*name.split("."))
        found += [file for file in (base.with_suffix(".py"), base / "__init__.py") if file.is_file()]
    return found


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:12]
