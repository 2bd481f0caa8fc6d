"""Planner of TPU jobs: one process on a TPU VM, or the same command on the VMs of a named TPU by gcloud."""

from __future__ import annotations

import shlex
from pathlib import Path

from hasten.errors import ConfigError
from hasten.launch.base import LaunchPlan, Proc, Request
from hasten.launch.host import Host
from hasten.launch.shape import Shape, worker_argv
from hasten.launch.slurm import without_submit
from hasten.launch.torchrun import supervision

_POD_FLAGS = ("--tpu_cluster", "--tpu-cluster", "--tpu_use_cluster", "--tpu-use-cluster")


def plan(request: Request, host: Host, shape: Shape) -> LaunchPlan:
    """One process that drives all devices of this VM.

    Raises: ConfigError when more processes were asked for, or the machine has no TPU and PJRT_DEVICE names no other device.
    """
    launch = request.config.launch
    asked = launch.num_processes or launch.processes_per_machine or 1
    if asked > 1 or shape.max_machines > 1:
        raise ConfigError(
            f"{asked} processes on {shape.max_machines} machine(s) were asked for on TPUs, where one process drives all devices of a "
            "machine and they share each batch. Leave num_processes and num_machines out."
        )
    if request.target.no_python:
        raise ConfigError(
            "--no_python cannot be combined with a TPU: the program must be a Python script. Leave it out."
        )
    device = host.env.get("PJRT_DEVICE") or ("TPU" if host.device == "tpu" else None)
    if device is None:
        raise ConfigError(
            f"training on TPUs was asked for, and {host.name} has none. Start it on a TPU VM, or set PJRT_DEVICE=CPU to try it here."
        )
    env = {name: value for name, value in shape.env if name != "OMP_NUM_THREADS"}
    drives = f"its {host.num_devices} TPU devices" if device == "TPU" and host.num_devices else f"all {device} devices"
    return LaunchPlan(
        launcher="xla",
        procs=(Proc(worker_argv(request.target, host), {**env, "PJRT_DEVICE": device}),),
        notes=(f"one process drives {drives}, and they share each batch",),
        supervision=supervision(request, shape),
        target=request.target,
    )


def plan_pod(request: Request, flags: tuple[str, ...]) -> LaunchPlan:
    """The same hasten command on the VMs of a named TPU, by gcloud.

    Raises: ConfigError without the name, or for a file of commands that cannot be read.
    """
    xla = request.config.xla
    if not xla.tpu_name:
        raise ConfigError("a TPU of other machines is reached by its name. Give --tpu_name (and --tpu_zone).")
    words = [word for word in without_submit(flags) if word not in _POD_FLAGS]
    command = shlex.join(["hasten", "launch", *words, request.target.name, *request.target.args])
    exports = "".join(f"export {shlex.quote(pair)}; " for pair in xla.tpu_env or ())
    setup = "".join(f"{line}; " for line in (*_lines(xla.command_file), *(xla.commands or ())))
    sudo = "sudo " if xla.tpu_use_sudo else ""
    argv = ["gcloud", "compute", "tpus", "tpu-vm", "ssh", xla.tpu_name]
    argv += ["--zone", xla.tpu_zone] if xla.tpu_zone else []
    argv += ["--worker", ",".join(xla.tpu_vm) if xla.tpu_vm else "all", "--command", f"{exports}{setup}{sudo}{command}"]
    return LaunchPlan(
        launcher="xla",
        procs=(Proc(tuple(argv)),),
        notes=("gcloud runs it on every VM; training on several together is refused there, as it was never tried",),
        target=request.target,
    )


def _lines(command_file: str | None) -> list[str]:
    """The commands in a file, one on each line."""
    if command_file is None:
        return []
    try:
        text = Path(command_file).read_text()
    except OSError as error:
        raise ConfigError(
            f"tpu_command_file={command_file!r} cannot be read: {error.strerror}. Correct the path, or leave it out."
        ) from error
    return [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
