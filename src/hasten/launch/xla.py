"""Planner of TPU jobs: one process on a TPU VM, or the same command on the VMs of a named TPU by gcloud."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from hasten.errors import ConfigError
from hasten.launch.base import LaunchPlan, Proc, Request
from hasten.launch.host import Host
from hasten.launch.shape import Shape, worker_argv
from hasten.launch.slurm import without_submit
from hasten.launch.torchrun import supervision
from hasten.runtime import tpu_hosts

_ONE_VM: Final = re.compile(r"(?!all$)(?!\d+-\d+$)[^,]+")
_PAIR: Final = re.compile(r"[A-Za-z_]\w*=")
_POD_FLAGS: Final = ("--tpu_cluster", "--tpu-cluster", "--tpu_use_cluster", "--tpu-use-cluster")


def plan(request: Request, host: Host, shape: Shape, hosts: int | None = None) -> LaunchPlan:
    """One process that drives all devices of this VM.

    Raises: ConfigError when more processes were asked for, the machine has no TPU and PJRT_DEVICE names no other device, or its
    TPU has several `hosts`.
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
    if device == "TPU" and hosts is not None and hosts > 1:
        raise ConfigError(tpu_hosts.refusal(hosts))
    env = {name: value for name, value in shape.env if name != "OMP_NUM_THREADS"}
    drives = f"its {host.num_devices} TPU devices" if device == "TPU" and host.num_devices else f"all {device} devices"
    return LaunchPlan(
        launcher="xla",
        procs=(Proc(worker_argv(request.target, host), {**env, "PJRT_DEVICE": device}),),
        notes=(f"one process drives {drives}, and they share each batch",),
        supervision=supervision(request, shape),
        target=request.target,
    )


def plan_pod(request: Request, flags: tuple[str, ...], hosts: int | None = None) -> LaunchPlan:
    """The same hasten command on the VM of a named TPU, by gcloud. `hosts` is how many VMs it has, where that is known.

    Raises: ConfigError without the name, for several VMs, or for a file of commands that cannot be read.
    """
    xla = request.config.xla
    if not xla.tpu_name:
        raise ConfigError("a TPU of other machines is reached by its name. Give --tpu_name (and --tpu_zone).")
    worker = ",".join(xla.tpu_vm or ("all",))
    env = _variables(xla.tpu_env or ())
    _refuse_several(xla.tpu_name, worker, hosts, tpu_hosts.alone(env))
    words = [word for word in without_submit(flags) if word not in _POD_FLAGS]
    command = shlex.join(["hasten", "launch", *words, request.target.name, *request.target.args])
    pairs = [f"{name}={value}" for name, value in env.items()]
    exports = "".join(f"export {shlex.quote(pair)}; " for pair in pairs)
    setup = "".join(f"{line}; " for line in (*_lines(xla.command_file), *(xla.commands or ())))
    # sudo gives a program none of the variables exported before it
    sudo = shlex.join(["sudo", *(["env", *pairs] if pairs else [])]) + " " if xla.tpu_use_sudo else ""
    argv = ["gcloud", "compute", "tpus", "tpu-vm", "ssh", xla.tpu_name]
    argv += ["--zone", xla.tpu_zone] if xla.tpu_zone else []
    argv += ["--worker", worker, "--command", f"{exports}{setup}{sudo}{command}"]
    known = f"{xla.tpu_name} has {hosts} host(s), as gcloud says"
    return LaunchPlan(
        launcher="xla",
        procs=(Proc(tuple(argv)),),
        notes=(
            known
            if hosts
            else "gcloud could not tell how many hosts it has; several are refused there, before training",
        ),
        target=request.target,
    )


def _refuse_several(name: str, worker: str, hosts: int | None, alone: bool) -> None:
    """Raise where VMs of a TPU would have to train together, or would wait for those that were not named."""
    if _ONE_VM.fullmatch(worker) is None and worker != "all":
        raise ConfigError(
            f"--vm names several VMs ({worker}), and training on several together is refused: it was never tried. Name one VM of a TPU "
            "with a single host, or leave --vm out."
        )
    if hosts is not None and hosts > 1 and not (alone and worker != "all"):
        raise ConfigError(tpu_hosts.refusal(hosts, f"the TPU {name!r}"))


def _variables(parts: Iterable[str]) -> dict[str, str]:
    """The variables in parts of a list that was divided at commas: a part that names none belongs to the value before it.

    Raises: ConfigError for a first part without a name.
    """
    found: dict[str, str] = {}
    for part in parts:
        if _PAIR.match(part):
            name, _, value = part.partition("=")
            found[name] = value
        elif found:
            found[list(found)[-1]] += f",{part}"
        else:
            raise ConfigError(f"tpu_env={part!r} sets no variable on the TPU VMs; write --env NAME=VALUE.")
    return found


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
