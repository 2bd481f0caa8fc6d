"""Planner of TPU jobs: torch_xla's own launcher on one TPU VM, the same command on every VM of a pod."""

from __future__ import annotations

import shlex

from hasten.errors import ConfigError
from hasten.launch.base import LaunchPlan, Proc, Request
from hasten.launch.host import Host
from hasten.launch.shape import Shape, worker_argv
from hasten.launch.slurm import without_submit
from hasten.launch.torchrun import supervision

_POD_FLAGS = ("--tpu_cluster", "--tpu-cluster", "--tpu_use_cluster", "--tpu-use-cluster")


def plan(request: Request, host: Host, shape: Shape) -> LaunchPlan:
    """One process that torch_xla multiplies over the chips of this VM."""
    env = {name: value for name, value in shape.env if name != "OMP_NUM_THREADS"}
    env["PJRT_DEVICE"] = host.env.get("PJRT_DEVICE", "TPU")
    if request.config.xla.downcast_bf16:
        env["XLA_DOWNCAST_BF16"] = "1"
    if request.target.no_python:
        raise ConfigError("--no_python cannot be combined with a TPU: torch_xla starts Python processes itself.")
    return LaunchPlan(
        launcher="xla",
        procs=(Proc(worker_argv(request.target, host, "hasten.launch.xla_worker"), env),),
        notes=("torch_xla starts one process for each chip of this VM",),
        supervision=supervision(request, shape),
        target=request.target,
    )


def plan_pod(request: Request, flags: tuple[str, ...]) -> LaunchPlan:
    """The same hasten command on every VM of a pod, by gcloud.

    Raises: ConfigError without the pod's name.
    """
    xla = request.config.xla
    if not xla.tpu_name:
        raise ConfigError("a TPU pod is reached by its name. Give --tpu_name (and --tpu_zone).")
    words = [word for word in without_submit(flags) if word not in _POD_FLAGS]
    command = shlex.join(["hasten", "launch", *words, request.target.name, *request.target.args])
    exports = "".join(f"export {shlex.quote(pair)}; " for pair in xla.tpu_env or ())
    setup = "".join(f"{line}; " for line in xla.commands or ())
    sudo = "sudo " if xla.tpu_use_sudo else ""
    argv = ["gcloud", "compute", "tpus", "tpu-vm", "ssh", xla.tpu_name]
    argv += ["--zone", xla.tpu_zone] if xla.tpu_zone else []
    argv += ["--worker", ",".join(xla.tpu_vm) if xla.tpu_vm else "all", "--command", f"{exports}{setup}{sudo}{command}"]
    return LaunchPlan(
        launcher="xla", procs=(Proc(tuple(argv)),), notes=("gcloud runs it on every VM",), target=request.target
    )
