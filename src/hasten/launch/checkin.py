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
    machine_index: int,
    num_machines: int,
    report: Report,
    *,
    timeout_s: float,
    report_waiting: Callable[[str], None] = lambda words: None,
) -> list[Report]:
    """Return every participant's report, in order of index.

    Ranks: every participant, once per round (the store's keys must be fresh).
    Raises: LaunchError on every participant if two have the same index, or if some have not reported after `timeout_s`.
    """
    if store.add(f"claim/{machine_index}", 1) > 1:
        rival_report = Report.decode(store.get(f"report/{machine_index}"))
        claim_message = (
            f"{report.host} ({report.address}) and {rival_report.host} ({rival_report.address}) both claim to be machine {machine_index} of "
            f"{num_machines}; each must be different. Correct --machine_rank (or the cluster's variables) on one of them."
        )
        store.set("broken", claim_message)
        raise LaunchError(claim_message)
    store.set(f"report/{machine_index}", report.encode())
    _wait_for_all(
        store, num_machines, timeout_s=timeout_s, report_waiting=report_waiting
    )
    reports = []
    for index in range(num_machines):
        reports.append(Report.decode(store.get(f"report/{index}")))
    return reports


def _wait_for_all(
    store: Store,
    num_machines: int,
    *,
    timeout_s: float,
    report_waiting: Callable[[str], None],
) -> None:
    """Wait until all participants have reported, logging the missing ones; raise if any of them found a fault."""
    start_s = time.monotonic()
    next_word = 5.0
    report_keys = [f"report/{machine_index}" for machine_index in range(num_machines)]
    while True:
        if store.check(["broken"]):
            raise LaunchError(store.get("broken").decode())
        if store.check(report_keys):
            return
        elapsed_s = time.monotonic() - start_s
        if elapsed_s > min(timeout_s, next_word):
            missing_machines = []
            for machine_index, report_key in enumerate(report_keys):
                if not store.check([report_key]):
                    missing_machines.append(f"machine {machine_index}")
            missing_text = f"{', '.join(missing_machines)} of {num_machines}"
            if elapsed_s > timeout_s:
                raise LaunchError(
                    f"{missing_text} did not check in within {timeout_s:g} s, so the job cannot start. "
                    f"Start the same command there, check that it reaches this address, or raise "
                    f"--rdzv_conf join_timeout=SECONDS."
                )
            report_waiting(f"waiting for {missing_text} ({elapsed_s:.0f} s)")
            next_word *= 2
        time.sleep(0.01 if elapsed_s < 1 else 0.1)


def list_differences(reports: Sequence[Report]) -> list[str]:
    """Return one line per difference in settings, code or versions, with the machines and the values."""
    differences: list[str] = []
    if len({report.config for report in reports}) > 1:
        differences += _setting_differences(reports) or [
            _format_difference("the settings", reports, lambda report: report.config)
        ]
    if len({report.code for report in reports}) > 1:
        programs = sorted({report.program for report in reports})
        differences.append(
            _format_difference(
                f"the code of {', '.join(programs)}",
                reports,
                lambda report: report.code,
            )
        )
    for package in sorted(set[str]().union(*[report.versions for report in reports])):
        if len({report.versions.get(package) for report in reports}) > 1:
            differences.append(
                _format_difference(
                    package,
                    reports,
                    lambda report, p=package: report.versions.get(p, "absent"),  # type: ignore[misc]
                )
            )
    return differences


def _setting_differences(reports: Sequence[Report]) -> list[str]:
    differences = []
    for setting_name in sorted(
        set[str]().union(*[report.settings for report in reports])
    ):
        if len({report.settings.get(setting_name) for report in reports}) > 1:
            differences.append(
                _format_difference(
                    f"the setting {setting_name}",
                    reports,
                    lambda report, n=setting_name: report.settings.get(
                        n, "its default"
                    ),  # type: ignore[misc]
                )
            )
    return differences


def _format_difference(
    subject: str, reports: Sequence[Report], read_value: Callable[[Report], str]
) -> str:
    """Return `what` followed by each value and the hosts that have it, the most common value first."""
    hosts_by_value: dict[str, list[str]] = {}
    for report in reports:
        hosts_by_value.setdefault(read_value(report), []).append(report.host)
    values_and_hosts = sorted(
        hosts_by_value.items(), key=lambda value_and_hosts: -len(value_and_hosts[1])
    )
    return f"{subject}: " + "; ".join(
        f"{value} on {', '.join(dict.fromkeys(hosts))}"
        for value, hosts in values_and_hosts
    )


def check_agreement(
    reports: Sequence[Report], expected_world_size: int | None = None
) -> None:
    """Raise unless all participants can train together.

    Raises: LaunchError that lists every difference, or the actual number of processes if it is not the requested one.
    """
    num_processes = sum(report.num_processes for report in reports)
    if expected_world_size is not None and num_processes != expected_world_size:
        process_counts = ", ".join(
            f"{report.num_processes} on {report.host}" for report in reports
        )
        raise LaunchError(
            f"num_processes={expected_world_size} is the total over all machines, but they start {num_processes} ({process_counts}). Correct "
            "--num_processes, or remove it to use every device."
        )
    if differences := list_differences(reports):
        difference_lines = "\n".join(f"  - {difference}" for difference in differences)
        raise LaunchError(
            f"the machines differ, so the job would diverge or hang:\n{difference_lines}\n"
            f"Use the same files and packages on every machine (or allow the difference: --check_in warn)."
        )


def rank_table(reports: Sequence[Report]) -> str:
    """Return an aligned table of the machines and the ranks on each."""
    table_rows = [("machine", "ranks", "host", "address", "device")]
    first_rank = 0
    for index, report in enumerate(reports):
        last_rank = first_rank + report.num_processes - 1
        if last_rank > first_rank:
            ranks_text = f"{first_rank}-{last_rank}"
        else:
            ranks_text = str(first_rank)
        table_rows.append(
            (str(index), ranks_text, report.host, report.address, report.device)
        )
        first_rank = last_rank + 1
    column_widths = []
    for column in range(len(table_rows[0])):
        column_widths.append(max(len(table_row[column]) for table_row in table_rows))
    return "\n".join(
        "  ".join(
            cell.ljust(width)
            for cell, width in zip(table_row, column_widths, strict=True)
        ).rstrip()
        for table_row in table_rows
    )


_COMPARED_PACKAGES: Final = (
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
_MACHINE_SETTINGS: Final = frozenset(
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
    num_processes = sum(proc.count for proc in plan.procs)
    if config.cpu:
        device_text = f"cpu ({host.cores} cores)"
    else:
        device_text = host.device_words
    if is_alone or plan.target is None:
        return Report(
            host=host.name, address="", num_processes=num_processes, device=device_text
        )
    shared_settings = dict(changed_settings(config))
    return Report(
        host=host.name,
        address="",
        num_processes=num_processes,
        device=device_text,
        machine_rank=plan.meeting.machine_rank if plan.meeting else None,
        config=_short_digest(repr(sorted(shared_settings.items())).encode()),
        code=code_digest(plan.target),
        program="the notebook's function"
        if plan.target.name == CELL
        else plan.target.name,
        versions=package_versions(),
        settings={
            setting_name: str(masked_value(setting_name, setting_value))
            for setting_name, setting_value in shared_settings.items()
        },
    )


def changed_settings(section: Section, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield the dotted name and value of each non-default setting that must be the same on every machine."""
    for field_name in section.__dataclass_fields__:
        field_value = getattr(section, field_name)
        dotted_name = f"{prefix}{field_name}"
        if isinstance(field_value, Section):
            yield from changed_settings(field_value, f"{dotted_name}.")
        elif dotted_name not in _MACHINE_SETTINGS and field_value != default_of(
            type(section), field_name
        ):
            yield dotted_name, repr(field_value)


def package_versions() -> dict[str, str]:
    """Return the versions of packages that must match across machines, without importing them."""
    versions = {"python": platform.python_version()}
    for package in _COMPARED_PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return versions


def code_digest(target: Target) -> str:
    """Return a digest of the program and of the files in its folder that it imports, directly or indirectly."""
    program_path = _program_file(target)
    if program_path is None:
        return ""
    file_contents: dict[Path, bytes] = {}
    pending_files = [program_path]
    while pending_files and len(file_contents) < _MAX_FILES:
        source_file = pending_files.pop()
        if source_file in file_contents:
            continue
        file_contents[source_file] = source_file.read_bytes()
        if source_file.suffix == ".py":
            pending_files += _local_imports(
                file_contents[source_file], program_path.parent
            )
    digested_parts = (
        f"{source_file.relative_to(program_path.parent)}\0".encode() + source_bytes
        for source_file, source_bytes in sorted(file_contents.items())
    )
    return _short_digest(b"\0".join(digested_parts))


def _program_file(target: Target) -> Path | None:
    if target.no_python:
        return None
    if target.module and target.name == CELL and target.args:
        return Path(target.args[0], SOURCE)
    if target.module:
        try:
            module_spec = importlib.util.find_spec(target.name)
        except (ImportError, ValueError):  # the workers report the full error
            return None
        if module_spec is not None and module_spec.origin:
            return Path(module_spec.origin).resolve()
        return None
    script_path = Path(target.name)
    return script_path.resolve() if script_path.is_file() else None


def _local_imports(source: bytes, folder: Path) -> list[Path]:
    """Return the files under `folder` that a module imports."""
    try:
        syntax_tree = ast.parse(source)
    except (SyntaxError, ValueError):  # the workers report the full error
        return []
    module_names: list[str] = []
    for syntax_node in ast.walk(syntax_tree):
        if isinstance(syntax_node, ast.Import):
            module_names += [alias.name for alias in syntax_node.names]
        elif isinstance(syntax_node, ast.ImportFrom) and syntax_node.module:
            module_names += [
                syntax_node.module,
                *(f"{syntax_node.module}.{alias.name}" for alias in syntax_node.names),
            ]
    imported_files: list[Path] = []
    for module_name in module_names:
        module_path = folder.joinpath(*module_name.split("."))
        for source_file in (
            module_path.with_suffix(".py"),
            module_path / "__init__.py",
        ):
            if source_file.is_file():
                imported_files.append(source_file)
    return imported_files


def _short_digest(digested_bytes: bytes) -> str:
    return hashlib.sha256(digested_bytes).hexdigest()[:12]
