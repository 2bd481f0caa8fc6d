"""`hasten test --matrix`: the self-check under each backend, precision and mesh that this machine supports."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from hasten.errors import ConfigError
from hasten.launch.base import look
from hasten.optional import available
from hasten.runtime import env

PROGRAM: Final = "hasten.testing.selfcheck"
_PRECISIONS: Final = MappingProxyType({"fp32": "no", "bf16": "bf16", "fp16": "fp16"})
_LIMIT_S: Final = 600.0
_FAILED: Final = 1
_DEEPSPEED: Final = "--strategy deepspeed --zero_stage"
# backend, processes, flags of `hasten launch`, package, precisions
_BACKENDS: Final = (
    ("single", 1, "", "", "fp32 bf16 fp16"),
    ("ddp", 2, "--strategy ddp", "", "fp32 bf16 fp16"),
    ("fsdp2", 2, "--strategy fsdp", "", "fp32 bf16 fp16"),
    ("hsdp", 4, "--strategy fsdp --dp_replicate_size 2 --dp_shard_size 2", "", "fp32 bf16"),
    ("tp", 2, "--tp_size 2", "", "fp32 bf16"),
    ("cp", 2, "--cp_size 2", "", "fp32 bf16"),
    ("pp", 2, "--pp_size 2", "", "fp32 bf16"),
    ("tp_fsdp2", 4, "--strategy fsdp --tp_size 2 --dp_shard_size 2", "", "fp32 bf16"),
    *((f"zero{stage}", 2, f"{_DEEPSPEED} {stage}", "deepspeed", "fp32 bf16") for stage in range(4)),
    ("zero2_offload", 2, f"{_DEEPSPEED} 2 --offload_optimizer_device cpu", "deepspeed", "fp32 bf16"),
    (
        "zero3_offload",
        2,
        f"{_DEEPSPEED} 3 --offload_optimizer_device cpu --offload_param_device cpu",
        "deepspeed",
        "fp32 bf16",
    ),
    ("xla", 1, "--strategy xla", "torch_xla", "fp32 bf16"),
    ("xla_fsdp", 1, "--strategy xla --xla_fsdp_v2 true", "torch_xla", "fp32 bf16"),
)


@dataclass(frozen=True, slots=True)
class Cell:
    """The self-check under one backend and precision."""

    backend: str
    precision: str
    processes: int
    flags: tuple[str, ...]
    package: str = ""
    """An optional package that the cell requires."""

    @property
    def name(self) -> str:
        """The name as shown, and as accepted by `--only`."""
        return f"{self.backend}-{self.precision}"

    def command(self, cpu: bool) -> tuple[str, ...]:
        """Return the arguments of `hasten launch`; torch_xla selects the CPU by a variable instead."""
        place = ("--cpu",) if cpu and self.package != "torch_xla" else ()
        size = ("--num_processes", str(self.processes), "--mixed_precision", _PRECISIONS[self.precision])
        return (*place, *size, *self.flags, "-m", PROGRAM)

    def missing(self, devices: int | None) -> str:
        """Return the requirement that this machine lacks; `devices` is None if the processes share the CPU."""
        if self.package and not available(self.package):
            return f"needs {self.package}"
        if devices is not None and self.processes > devices:
            return f"needs {self.processes} devices, {devices} here"
        return ""


def cells() -> Iterator[Cell]:
    """Yield all cells, the simplest first."""
    for backend, processes, flags, package, precisions in _BACKENDS:
        for precision in precisions.split():
            yield Cell(backend, precision, processes, tuple(flags.split()), package)


def chosen(only: str | None) -> list[Cell]:
    """Return the cells selected by `--only`: a list of backends (`ddp`), precisions (`bf16`) or cells (`ddp-bf16`).

    Raises: ConfigError for an unknown name.
    """
    if only is None:
        return list(cells())
    words = {word.strip() for word in only.split(",")} - {""}
    backends = {cell.backend for cell in cells()}
    unknown = words - {cell.name for cell in cells()} - backends - set(_PRECISIONS)
    if unknown or not words:
        raise ConfigError(
            f"--only {min(unknown, default=only)!r} matches no cell of the matrix; name backends ({', '.join(sorted(backends))}), "
            "precisions (fp32, bf16, fp16) or both as in ddp-bf16."
        )
    asked_backends, asked_precisions = words & backends, words & set(_PRECISIONS)

    def is_selected(cell: Cell) -> bool:
        if cell.name in words or not (asked_backends or asked_precisions):
            return cell.name in words
        return cell.backend in (asked_backends or backends) and cell.precision in (asked_precisions or _PRECISIONS)

    return [cell for cell in cells() if is_selected(cell)]


def run(only: str | None, cpu: bool) -> int:
    """Run the self-check in the chosen cells and print a line for each; return 1 if one fails, else 0."""
    host = look()
    on_cpu = cpu or host.device == "cpu"
    code = 0
    for cell in chosen(only):
        if lacking := cell.missing(None if on_cpu else host.num_devices):
            sys.stdout.write(f"skipped {cell.name:<20} {lacking}\n")
            continue
        start = time.monotonic()
        passed, words = check(cell, on_cpu)
        code = code if passed else _FAILED
        verdict = "passed " if passed else "FAILED "
        sys.stdout.write(f"{verdict} {cell.name:<20} {time.monotonic() - start:.0f} s, {words}\n")
        sys.stdout.flush()
    return code


def check(cell: Cell, cpu: bool) -> tuple[bool, str]:
    """Run one cell; return whether its self-check passed, with the result of its training or the reason."""
    command = [sys.executable, "-m", "hasten.cli.main", "launch", *cell.command(cpu)]
    variables = {**env.snapshot(), **({"PJRT_DEVICE": "CPU"} if cpu and cell.package == "torch_xla" else {})}
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT_S, env=variables)
    except subprocess.TimeoutExpired:
        return False, f"did not end within {_LIMIT_S:.0f} s"
    trained = re.search(r"^passed +training +[^:]*: (.*)$", done.stdout, re.MULTILINE)
    if done.returncode == 0 and trained is not None:
        return True, trained[1]
    return False, last_words(done.stdout + done.stderr)


def last_words(text: str) -> str:
    """Return the most informative line of a failed run's output: a failed check, its last error, else its last line."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    failed = [line for line in lines if line.startswith("FAILED")]
    errors = [line for line in lines if "Error" in line]
    return (failed[:1] or errors[-1:] or lines[-1:] or ["no output"])[0][:300]
