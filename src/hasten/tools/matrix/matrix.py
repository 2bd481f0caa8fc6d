"""`hasten test --matrix`: runs the cells one after another, shows progress, and prints the table."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from rich import box
from rich.console import Console
from rich.table import Table

from hasten.launch.host import look
from hasten.launch.matrix import Cell, Outcome, chosen, devices_of, last_words
from hasten.runtime import env

_LIMIT_S: Final = 600.0


def run(only: str | None, as_json: bool, cpu: bool) -> int:
    """Run the chosen cells; 1 if a loss curve differs from one plain process or a cell fails, else 0."""
    host = look()
    devices = devices_of(host.device, host.num_devices, cpu)
    wanted = chosen(only)
    told = Console(stderr=True)
    outcomes: list[Outcome] = []
    for number, cell in enumerate(wanted, 1):
        outcome = _left_out(cell, devices) or _try(cell, cpu or devices is None, f"[{number}/{len(wanted)}]", told)
        outcomes.append(outcome)
        told.print(f"[{number}/{len(wanted)}] {cell.name}: {outcome.status}", markup=False, highlight=False)
    if as_json:
        sys.stdout.write(json.dumps([outcome.row() for outcome in outcomes], indent=2) + "\n")
    else:
        _show(outcomes)
    return 1 if any(outcome.bad for outcome in outcomes) else 0


def _left_out(cell: Cell, devices: int | None) -> Outcome | None:
    lacking = cell.missing(devices)
    return None if lacking is None else Outcome(cell, "left out", note=lacking)


def _try(cell: Cell, cpu: bool, place: str, told: Console) -> Outcome:
    told.print(f"{place} {cell.name}: {cell.processes} processes …", markup=False, highlight=False)
    with tempfile.TemporaryDirectory(prefix="hasten-matrix-") as folder:
        out = Path(folder) / "found.json"
        words = [sys.executable, "-m", "hasten.cli.main", "launch", *cell.command(str(out), cpu)]
        began = time.perf_counter()
        try:
            variables = {**env.snapshot(), **dict([cell.cpu_variable] if cpu and cell.cpu_variable else [])}
            done = subprocess.run(words, capture_output=True, text=True, timeout=_LIMIT_S, env=variables)
        except subprocess.TimeoutExpired:
            return Outcome(cell, "FAILED", seconds=_LIMIT_S, note=f"did not end within {_LIMIT_S:.0f} s")
        if done.returncode or not out.exists():
            spent = time.perf_counter() - began
            return Outcome(cell, "FAILED", seconds=spent, note=last_words(done.stdout + done.stderr))
        found = json.loads(out.read_text())
    equal = found["difference"] <= found["tolerance"]  # nan is not
    note = "" if equal else f"more than {found['tolerance']:g}"
    return Outcome(
        cell, "equal" if equal else "DIFFERS", found["difference"], found["seconds"], found["megabytes"], note
    )


def _show(outcomes: Sequence[Outcome]) -> None:
    console = Console()
    if not console.is_terminal:
        console.width = 160  # a file or pipe has no edge to break lines at
    console.print(table(outcomes))


def table(outcomes: Sequence[Outcome]) -> Table:
    """Return one row per cell, narrow enough for a terminal of 80 columns."""
    shown = Table(title="the same training in one plain process, and here", box=box.SIMPLE_HEAD, pad_edge=False)
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
