"""`hasten test --matrix`: a small training with every backend, precision and mesh, compared with one process."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Final

from rich import box
from rich.console import Console
from rich.table import Table

from hasten.errors import ConfigError
from hasten.launch.base import look
from hasten.optional import available
from hasten.runtime import env

PROGRAM: Final = "hasten.testing.matrix_run"
_ON_CPU: Final = MappingProxyType({"torch_xla": ("PJRT_DEVICE", "CPU")})
_SHORT: Final = (("fp32", "no"), ("bf16", "bf16"), ("fp16", "fp16"))


@dataclass(frozen=True, slots=True)
class Cell:
    """One small training."""

    backend: str
    precision: str
    processes: int
    flags: tuple[str, ...]
    """Arguments of `hasten launch` besides precision and processes."""
    package: str = ""
    """An optional package that the cell requires."""
    cpu_variable: tuple[str, str] | None = None
    """Variable that selects the CPU in an engine without --cpu."""

    @property
    def name(self) -> str:
        """The name as shown, and as accepted by `--only`."""
        return f"{self.backend}-{self.precision}"

    def command(self, out: str, cpu: bool) -> tuple[str, ...]:
        """Return the arguments of `hasten launch` that run this cell and write its result to the file `out`."""
        return (
            *(("--cpu",) if cpu and self.cpu_variable is None else ()),
            *("--num_processes", str(self.processes), "--mixed_precision", dict(_SHORT)[self.precision]),
            *self.flags,
            *("-m", PROGRAM, out),
        )

    def missing(self, devices: int | None) -> str | None:
        """Return the requirement that this machine lacks, or None; `devices` is None on the CPU, which needs none."""
        if self.package and not available(self.package):
            return f"needs {self.package}"
        if devices is not None and self.processes > devices:
            return f"needs {self.processes} devices, {devices} here"
        return None


def cells() -> tuple[Cell, ...]:
    """Return all cells, the simplest first."""
    all_, full = ("fp32", "bf16", "fp16"), ("fp32", "bf16")
    kinds: list[tuple[str, int, tuple[str, ...], tuple[str, ...], str]] = [
        ("single", 1, (), all_, ""),
        ("ddp", 2, ("--strategy", "ddp"), all_, ""),
        ("fsdp2", 2, ("--strategy", "fsdp"), all_, ""),
        ("hsdp", 4, ("--strategy", "fsdp", "--dp_replicate_size", "2", "--dp_shard_size", "2"), full, ""),
        ("tp", 2, ("--tp_size", "2"), full, ""),
        ("cp", 2, ("--cp_size", "2"), full, ""),
        ("pp", 2, ("--pp_size", "2"), full, ""),
        ("tp_fsdp2", 4, ("--strategy", "fsdp", "--tp_size", "2", "--dp_shard_size", "2"), full, ""),
    ]
    for stage in range(4):
        flags = ("--strategy", "deepspeed", "--zero_stage", str(stage))
        kinds.append((f"zero{stage}", 2, flags, full, "deepspeed"))
    for stage, parts in ((2, ("optimizer",)), (3, ("optimizer", "param"))):
        offload = tuple(word for part in parts for word in (f"--offload_{part}_device", "cpu"))
        more = ("--strategy", "deepspeed", "--zero_stage", str(stage), *offload)
        kinds.append((f"zero{stage}_offload", 2, more, full, "deepspeed"))
    kinds.append(("xla", 1, ("--strategy", "xla"), full, "torch_xla"))
    kinds.append(("xla_fsdp", 1, ("--strategy", "xla", "--xla_fsdp_v2", "true"), full, "torch_xla"))
    return tuple(
        Cell(backend, precision, processes, flags, package, _ON_CPU.get(package))
        for backend, processes, flags, precisions, package in kinds
        for precision in precisions
    )


def chosen(only: str | None) -> tuple[Cell, ...]:
    """Return the cells selected by `--only`: a list of backends (`ddp`), precisions (`bf16`) or cells (`ddp-bf16`).

    Raises: ConfigError for an unknown name.
    """
    everything = cells()
    if only is None:
        return everything
    wanted = [word.strip() for word in only.split(",") if word.strip()]
    known = {word for cell in everything for word in (cell.name, cell.backend, cell.precision)}
    if unknown := [word for word in wanted if word not in known] or ([] if wanted else [only]):
        names = ", ".join(dict.fromkeys(cell.backend for cell in everything))
        raise ConfigError(
            f"--only {unknown[0]!r} matches no cell of the matrix; name backends ({names}), precisions (fp32, "
            "bf16, fp16) or both as in ddp-bf16."
        )
    backends = {word for word in wanted if word in {cell.backend for cell in everything}}
    precisions = {word for word in wanted if word in dict(_SHORT)}
    exact = {word for word in wanted if "-" in word}

    def fits(cell: Cell) -> bool:
        if cell.name in exact:
            return True
        if not backends and not precisions:
            return False
        return (not backends or cell.backend in backends) and (not precisions or cell.precision in precisions)

    return tuple(cell for cell in everything if fits(cell))


def devices_of(kind: str, count: int, cpu: bool) -> int | None:
    """Return the number of devices, of which each process takes one; None if the processes share the CPU."""
    return None if cpu or kind == "cpu" else count


@dataclass(frozen=True, slots=True)
class CellOutcome:
    """Result of a cell."""

    cell: Cell
    status: str
    """`equal`, `DIFFERS`, `FAILED` or `left out`."""
    difference: float | None = None
    seconds: float | None = None
    megabytes: float | None = None
    note: str = ""

    @property
    def bad(self) -> bool:
        """True if the command must fail."""
        return self.status in ("DIFFERS", "FAILED")

    def row(self) -> dict[str, object]:
        """Return the result as data for `--json`."""
        return {
            "name": self.cell.name,
            "backend": self.cell.backend,
            "precision": self.cell.precision,
            "processes": self.cell.processes,
            "status": self.status,
            "max_difference": self.difference,
            "seconds": self.seconds,
            "megabytes": self.megabytes,
            "note": self.note,
        }


def last_words(text: str) -> str:
    """Return the most informative line of a failed run's output: its last error, else its last line."""
    lines: Sequence[str] = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if "Error" in line]
    return (errors or lines or ["no output"])[-1][:300]


_LIMIT_S: Final = 600.0


def run(only: str | None, as_json: bool, cpu: bool) -> int:
    """Run the chosen cells; return 1 if a loss curve differs from one plain process or a cell fails, else 0."""
    host = look()
    devices = devices_of(host.device, host.num_devices, cpu)
    wanted = chosen(only)
    status_console = Console(stderr=True)
    outcomes: list[CellOutcome] = []
    for number, cell in enumerate(wanted, 1):
        outcome = _left_out(cell, devices) or _try(
            cell, cpu or devices is None, f"[{number}/{len(wanted)}]", status_console
        )
        outcomes.append(outcome)
        status_console.print(f"[{number}/{len(wanted)}] {cell.name}: {outcome.status}", markup=False, highlight=False)
    if as_json:
        sys.stdout.write(json.dumps([outcome.row() for outcome in outcomes], indent=2) + "\n")
    else:
        _show(outcomes)
    return 1 if any(outcome.bad for outcome in outcomes) else 0


def _left_out(cell: Cell, devices: int | None) -> CellOutcome | None:
    lacking = cell.missing(devices)
    return None if lacking is None else CellOutcome(cell, "left out", note=lacking)


def _try(cell: Cell, cpu: bool, place: str, status_console: Console) -> CellOutcome:
    status_console.print(f"{place} {cell.name}: {cell.processes} processes …", markup=False, highlight=False)
    with tempfile.TemporaryDirectory(prefix="hasten-matrix-") as folder:
        out = Path(folder) / "found.json"
        words = [sys.executable, "-m", "hasten.cli.main", "launch", *cell.command(str(out), cpu)]
        began = time.perf_counter()
        try:
            variables = {**env.snapshot(), **dict([cell.cpu_variable] if cpu and cell.cpu_variable else [])}
            done = subprocess.run(words, capture_output=True, text=True, timeout=_LIMIT_S, env=variables)
        except subprocess.TimeoutExpired:
            return CellOutcome(cell, "FAILED", seconds=_LIMIT_S, note=f"did not end within {_LIMIT_S:.0f} s")
        if done.returncode or not out.exists():
            spent = time.perf_counter() - began
            return CellOutcome(cell, "FAILED", seconds=spent, note=last_words(done.stdout + done.stderr))
        found = json.loads(out.read_text())
    equal = found["difference"] <= found["tolerance"]  # False for NaN
    note = "" if equal else f"more than {found['tolerance']:g}"
    return CellOutcome(
        cell, "equal" if equal else "DIFFERS", found["difference"], found["seconds"], found["megabytes"], note
    )


def _show(outcomes: Sequence[CellOutcome]) -> None:
    console = Console()
    if not console.is_terminal:
        console.width = 160  # a file or pipe has no width at which lines break
    console.print(table(outcomes))


def table(outcomes: Sequence[CellOutcome]) -> Table:
    """Return a table with one row per cell, narrow enough for a terminal of 80 columns."""
    shown = Table(
        title="the same training in one plain process, and in this configuration", box=box.SIMPLE_HEAD, pad_edge=False
    )
    for title, side in (
        ("backend", "left"),
        ("precision", "left"),
        ("ranks", "right"),
        ("losses", "left"),
        ("difference", "right"),
        ("time", "right"),
        ("memory", "right"),
        ("note", "left"),
    ):
        shown.add_column(
            title, justify="right" if side == "right" else "left", no_wrap=title != "note", overflow="fold"
        )
    for one in outcomes:
        shown.add_row(
            one.cell.backend,
            one.cell.precision,
            str(one.cell.processes),
            one.status,
            "" if one.difference is None else f"{one.difference:.1e}",
            "" if one.seconds is None else f"{one.seconds:.2f} s",
            "" if one.megabytes is None else f"{one.megabytes:.0f} MB",
            one.note,
        )
    return shown
