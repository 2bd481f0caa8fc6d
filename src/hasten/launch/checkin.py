"""Check-in of machines before user code runs: the report of each machine (settings, code, packages), the comparison, the table of ranks."""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import json
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from importlib import metadata
from pathlib import Path
from typing import Final, Protocol, Self

from hasten.config.base import Section, default_of
from hasten.config.masking import masked_value
from hasten.config.root import Config
from hasten.errors import LaunchError
from hasten.launch.base import Host, LaunchPlan, Target


class Store(Protocol):
    """Subset of torch's key-value store interface used by the check-in."""

    def set(self, key: str, value: str, /) -> None: ...
    def get(self, key: str, /) -> bytes: ...
    def add(self, key: str, value: int, /) -> int: ...
    def check(self, keys: list[str], /) -> bool: ...
    def wait(self, keys: list[str], timeout: timedelta, /) -> None: ...


@dataclass(frozen=True, slots=True)
class Report:
    """Description of one machine."""

    host: str
    address: str
    num_processes: int
    device: str = "cpu"
    machine_rank: int | None = None
    config: str = ""
    """Digest of the resolved settings."""
    code: str = ""
    """Digest of the program and of the files that it imports from its folder."""
    program: str = ""
    versions: dict[str, str] = field(default_factory=dict)
    settings: dict[str, str] = field(default_factory=dict)
    """Settings that differ from their defaults, by dotted name; used to report a disagreement between machines."""

    def encode(self) -> str:
        """Return the report as JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def decode(cls, text: bytes | str) -> Self:
        """Return the report in `text`."""
        return cls(**json.loads(text))


def gather_reports(
    store: Store,
    index: int,
    count: int,
    report: Report,
    *,
    timeout_s: float,
    waiting: Callable[[str], None] = lambda words: None,
) -> list[Report]:
    """Return every participant's report, in order of index.

    Ranks: every participant, once per round (the store's keys must be fresh).
    Raises: LaunchError on every participant if two have the same index, or if some have not reported after `timeout_s`.
    """
    if store.add(f"claim/{index}", 1) > 1:
        rival_report = Report.decode(store.get(f"report/{index}"))
        message = (
            f"{report.host} ({report.address}) and {rival_report.host} ({rival_report.address}) both claim to be machine {index} of "
            f"{count}; each must be different. Correct --machine_rank (or the cluster's variables) on one of them."
        )
        store.set("broken", message)
        raise LaunchError(message)
    store.set(f"report/{index}", report.encode())
    _wait_for_all(store, count, timeout_s=timeout_s, waiting=waiting)
    return [Report.decode(store.get(f"report/{i}")) for i in range(count)]


def _wait_for_all(
    store: Store,
    count: int,
    *,
    timeout_s: float,
    waiting: Callable[[str], None],
) -> None:
    """Wait until all participants have reported, logging the missing ones; raise if any of them found a fault."""
    start, next_word = time.monotonic(), 5.0
    keys = [f"report/{i}" for i in range(count)]
    while True:
        if store.check(["broken"]):
            raise LaunchError(store.get("broken").decode())
        if store.check(keys):
            return
        elapsed = time.monotonic() - start
        if elapsed > min(timeout_s, next_word):
            missing = [
                f"machine {i}" for i, key in enumerate(keys) if not store.check([key])
            ]
            words = f"{', '.join(missing)} of {count}"
            if elapsed > timeout_s:
                raise LaunchError(
                    f"{words} did not check in within {timeout_s:g} s, so the job cannot start. "
                    f"Start the same command there, check that it reaches this address, or raise "
                    f"--rdzv_conf join_timeout=SECONDS."
                )
            waiting(f"waiting for {words} ({elapsed:.0f} s)")
            next_word *= 2
        time.sleep(0.01 if elapsed < 1 else 0.1)


def disagreements(reports: Sequence[Report]) -> list[str]:
    """Return one line per difference in settings, code or versions, with the machines and the values."""
    differences: list[str] = []
    if len({r.config for r in reports}) > 1:
        differences += _setting_differences(reports) or [
            _values("the settings", reports, lambda r: r.config)
        ]
    if len({r.code for r in reports}) > 1:
        programs = sorted({r.program for r in reports})
        differences.append(
            _values(f"the code of {', '.join(programs)}", reports, lambda r: r.code)
        )
    for package in sorted({p for r in reports for p in r.versions}):
        if len({r.versions.get(package) for r in reports}) > 1:
            differences.append(
                _values(
                    package,
                    reports,
                    lambda r, p=package: r.versions.get(p, "absent"),  # type: ignore[misc]
                )
            )
    return differences


def _setting_differences(reports: Sequence[Report]) -> list[str]:
    names = sorted({name for r in reports for name in r.settings})
    return [
        _values(
            f"the setting {name}",
            reports,
            lambda r, n=name: r.settings.get(n, "its default"),  # type: ignore[misc]
        )
        for name in names
        if len({r.settings.get(name) for r in reports}) > 1
    ]


def _values(
    subject: str, reports: Sequence[Report], read: Callable[[Report], str]
) -> str:
    """Return `what` followed by each value and the hosts that have it, the most common value first."""
    holders: dict[str, list[str]] = {}
    for report in reports:
        holders.setdefault(read(report), []).append(report.host)
    ordered = sorted(holders.items(), key=lambda item: -len(item[1]))
    return f"{subject}: " + "; ".join(
        f"{value} on {', '.join(dict.fromkeys(hosts))}" for value, hosts in ordered
    )


def check_agreement(
    reports: Sequence[Report], expected_world_size: int | None = None
) -> None:
    """Raise unless all participants can train together.

    Raises: LaunchError that lists every difference, or the actual number of processes if it is not the requested one.
    """
    total = sum(r.num_processes for r in reports)
    if expected_world_size is not None and total != expected_world_size:
        counts = ", ".join(f"{r.num_processes} on {r.host}" for r in reports)
        raise LaunchError(
            f"num_processes={expected_world_size} is the total over all machines, but they start {total} ({counts}). Correct "
            "--num_processes, or remove it to use every device."
        )
    if differences := disagreements(reports):
        lines = "\n".join(f"  - {line}" for line in differences)
        raise LaunchError(
            f"the machines differ, so the job would diverge or hang:\n{lines}\n"
            f"Use the same files and packages on every machine (or allow the difference: --check_in warn)."
        )


def rank_table(reports: Sequence[Report]) -> str:
    """Return an aligned table of the machines and the ranks on each."""
    rows = [("machine", "ranks", "host", "address", "device")]
    first_rank = 0
    for index, report in enumerate(reports):
        last_rank = first_rank + report.num_processes - 1
        ranks = (
            f"{first_rank}-{last_rank}" if last_rank > first_rank else str(first_rank)
        )
        rows.append((str(index), ranks, report.host, report.address, report.device))
        first_rank = last_rank + 1
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        "  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )


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
        *(
            "machine_rank",
            "processes_per_machine",
            "gpu_ids",
            "num_cpu_threads_per_process",
            "log_dir",
            "tee",
            "quiet",
        ),
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


def make_report(
    plan: LaunchPlan, config: Config, host: Host, *, is_alone: bool
) -> Report:
    """Return this machine's report; without the digests on a single machine, which has nothing to compare with."""
    count = sum(proc.count for proc in plan.procs)
    device = f"cpu ({host.cores} cores)" if config.cpu else host.device_words
    if is_alone or plan.target is None:
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
        program="the notebook's function"
        if plan.target.name == CELL
        else plan.target.name,
        versions=package_versions(),
        settings={
            name: str(masked_value(name, value)) for name, value in settings.items()
        },
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
    versions = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return versions


def code_digest(target: Target) -> str:
    """Return a digest of the program and of the files in its folder that it imports, directly or indirectly."""
    path = _program_file(target)
    if path is None:
        return ""
    file_contents: dict[Path, bytes] = {}
    todo = [path]
    while todo and len(file_contents) < _MAX_FILES:
        file = todo.pop()
        if file in file_contents:
            continue
        file_contents[file] = file.read_bytes()
        if file.suffix == ".py":
            todo += _local_imports(file_contents[file], path.parent)
    digested_parts = (
        f"{file.relative_to(path.parent)}\0".encode() + text
        for file, text in sorted(file_contents.items())
    )
    return _digest(b"\0".join(digested_parts))


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
            names += [
                node.module,
                *(f"{node.module}.{alias.name}" for alias in node.names),
            ]
    imported_files: list[Path] = []
    for name in names:
        base = folder.joinpath(*name.split("."))
        imported_files += [
            file
            for file in (base.with_suffix(".py"), base / "__init__.py")
            if file.is_file()
        ]
    return imported_files


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:12]
