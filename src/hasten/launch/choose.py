"""Selection of the launcher for a request, and its plan."""

from __future__ import annotations

from typing import Literal, assert_never, cast

from hasten.config.sections.launch import LaunchConfig
from hasten.errors import ConfigError
from hasten.launch import deepspeed, mpi, single, slurm, torchrun, xla
from hasten.launch.base import Host, LaunchPlan, LaunchRequest
from hasten.launch.shape import JobShape, decide
from hasten.runtime.tpu_hosts import TpuSlice

OwnLauncher = Literal["single", "torchrun", "task", "xla"]


def make_plan(
    request: LaunchRequest,
    host: Host,
    *,
    flags: tuple[str, ...] = (),
    folder: str = ".",
    installed_mpi: mpi.Mpi | None = None,
    tpu: TpuSlice | None = None,
) -> LaunchPlan:
    """Return the plan for `request` on `host`.

    `flags` are the command-line options as typed, for plans that repeat the command on other machines. `tpu` describes the TPU's hosts,
    if known.

    Raises: ConfigError for settings that contradict each other or this machine.
    """
    config = request.config
    if config.launch.submit == "slurm":
        return slurm.plan_submit(request, host, flags, folder)
    if config.launch.tpu and config.xla.tpu_use_cluster:
        return xla.plan_pod(request, flags, tpu)
    if uses_mpi(request):
        return mpi.plan(request, host, installed_mpi or mpi.Mpi())
    if _uses_deepspeed(request):
        return deepspeed.plan(request, host)
    shape = decide(request, host)
    name = _launcher(request, host, shape)
    match name:
        case "single":
            return single.plan(request, host, shape)
        case "torchrun":
            return torchrun.plan(request, host, shape)
        case "task":
            return slurm.plan_task(request, host, shape)
        case "xla":
            return xla.plan(request, host, shape, tpu)
        case other:
            assert_never(other)


def uses_mpi(request: LaunchRequest) -> bool:
    """Return whether the plan is an mpirun command, in which case the installed MPI must be detected."""
    launch = request.config.launch
    return launch.launcher == "mpi" or (launch.launcher == "auto" and launch.mpirun_hostfile is not None)


def _uses_deepspeed(request: LaunchRequest) -> bool:
    launch, config = request.config.launch, request.config
    named = config.strategy == "deepspeed" and config.deepspeed.multinode_launcher != "standard"
    return launch.launcher == "deepspeed" or (launch.launcher == "auto" and named)


def _launcher(request: LaunchRequest, host: Host, shape: JobShape) -> OwnLauncher:
    config, launch = request.config, request.config.launch
    if launch.launcher == "slurm" and shape.allocation.rank is None:
        if not shape.allocation.source:
            raise ConfigError(
                "launcher=slurm reads its ranks from SLURM, but srun did not start this command. "
                "Start it with srun, or write a batch script with --submit slurm."
            )
        return "torchrun"
    if launch.launcher == "single" and (shape.num_processes > 1 or shape.max_machines > 1):
        raise ConfigError(
            f"launcher=single starts one process, but {shape.num_processes} on {shape.max_machines} machine(s) were requested. "
            f"Remove launcher, or set num_processes to 1."
        )
    if shape.allocation.rank is not None:
        return "task"
    if launch.launcher in ("single", "torchrun", "xla"):
        return cast(OwnLauncher, launch.launcher)
    if (
        launch.tpu
        or config.strategy == "xla"
        or (host.device == "tpu" and not config.cpu and config.strategy == "auto")
    ):
        return "xla"
    alone = shape.num_processes == 1 and shape.max_machines == 1
    return "torchrun" if _needs_agent(launch) or not alone else "single"


def _needs_agent(launch: LaunchConfig) -> bool:
    """Return whether a setting needs the elastic agent; a single process is otherwise started without it."""
    meeting = (launch.rdzv_conf, launch.rdzv_endpoint, launch.rdzv_id, launch.log_dir, launch.tee)
    plain = LaunchConfig()
    return (
        launch.max_restarts > 0
        or any(value is not None for value in meeting)
        or launch.rdzv_backend != plain.rdzv_backend
        or launch.role != plain.role
    )
