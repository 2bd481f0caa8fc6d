"""`hasten test --matrix`: the self-check under each of hasten's own strategies and precisions."""

from __future__ import annotations

import re
import subprocess
import sys
from types import MappingProxyType
from typing import Final

from hasten.errors import ConfigError
from hasten.launch.base import describe_host

PROGRAM: Final = "hasten.extensions.selfcheck.selfcheck"
_LIMIT_S: Final = 600.0
_PRECISIONS: Final = MappingProxyType({"fp32": "no", "bf16": "bf16", "fp16": "fp16"})
# strategy, processes, flags of `hasten launch`, precisions
_STRATEGIES: Final = (
    ("single", 1, "", "fp32 bf16 fp16"),
    ("ddp", 2, "--strategy ddp", "fp32 bf16 fp16"),
    ("fsdp2", 2, "--strategy fsdp", "fp32 bf16 fp16"),
    ("hsdp", 4, "--strategy fsdp --dp_replicate_size 2 --dp_shard_size 2", "fp32 bf16"),
    ("tp", 2, "--tp_size 2", "fp32 bf16"),
    ("cp", 2, "--cp_size 2", "fp32 bf16"),
    ("pp", 2, "--pp_size 2", "fp32 bf16"),
    ("tp_fsdp2", 4, "--strategy fsdp --tp_size 2 --dp_shard_size 2", "fp32 bf16"),
)
CELLS: Final = MappingProxyType[str, tuple[int, tuple[str, ...]]](
    {
        f"{strategy}-{precision}": (
            num_processes,
            (
                "--num_processes",
                str(num_processes),
                "--mixed_precision",
                _PRECISIONS[precision],
                *flags.split(),
            ),
        )
        for strategy, num_processes, flags, precisions in _STRATEGIES
        for precision in precisions.split()
    }
)
"""Number of processes and flags of `hasten launch` for each cell."""


def select_cells(only: str | None) -> list[str]:
    """Return the cells of strategies (`ddp`), precisions (`bf16`) and cells (`ddp-bf16`) in a list with commas.

    Raises: ConfigError for a name that selects nothing.
    """
    if only is None:
        return list(CELLS)
    selected_names = [selected_name.strip() for selected_name in only.split(",")]
    for selected_name in selected_names:
        if not any(selected_name in (cell, *cell.split("-")) for cell in CELLS):
            raise ConfigError(
                f"--only: {selected_name!r} is no cell of the matrix; name some of {', '.join(CELLS)}."
            )
    return [cell for cell in CELLS if {cell, *cell.split("-")} & set(selected_names)]


def run_cells(only: str | None, cpu: bool) -> int:
    """Run the self-check in the chosen cells and print a line for each; return 1 if one fails, else 0."""
    machine = describe_host()
    on_cpu = cpu or machine.device == "cpu"
    exit_code = 0
    for cell in select_cells(only):
        num_processes, flags = CELLS[cell]
        if not on_cpu and num_processes > machine.num_devices:
            sys.stdout.write(
                f"skipped {cell:<16} needs {num_processes} devices, {machine.num_devices} here\n"
            )
            continue
        passed, summary = check_cell([*(["--cpu"] if on_cpu else []), *flags])
        sys.stdout.write(f"{'passed ' if passed else 'FAILED '} {cell:<16} {summary}\n")
        sys.stdout.flush()
        exit_code = exit_code if passed else 1
    return exit_code


def check_cell(flags: list[str]) -> tuple[bool, str]:
    """Return whether the self-check passes under these flags of `hasten launch`, with its losses or its last error."""
    command = [sys.executable, "-m", "hasten.cli.main", "launch", *flags, "-m", PROGRAM]
    try:
        finished_process = subprocess.run(
            command, capture_output=True, text=True, timeout=_LIMIT_S
        )
    except subprocess.TimeoutExpired:
        return False, f"did not end within {_LIMIT_S:.0f} s"
    trained = re.search(
        r"^passed +training +[^:]*: (.*)$", finished_process.stdout, re.MULTILINE
    )
    if finished_process.returncode == 0 and trained is not None:
        return True, trained[1]
    output_lines = [
        output_line.strip()
        for output_line in (
            finished_process.stdout + finished_process.stderr
        ).splitlines()
    ]
    failed_lines = [
        output_line for output_line in output_lines if output_line.startswith("FAILED")
    ]
    error_lines = [
        output_line for output_line in output_lines if "Error" in output_line
    ]
    return False, (failed_lines[:1] or error_lines[-1:] or ["no output"])[0][:300]
