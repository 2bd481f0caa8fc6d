"""Launch plans for DeepSpeed's launcher: one `deepspeed` command that starts the machines of a hostfile."""

from __future__ import annotations

from typing import Final

from hasten.errors import ConfigError
from hasten.extensions.deepspeed.settings import DeepSpeedPlugin
from hasten.launch.base import (
    Host,
    LaunchPlan,
    LaunchRequest,
    LaunchTarget,
    PlannedFile,
    Proc,
)
from hasten.launch.shape import remote_shape
from hasten.launch.torchrun import supervision
from hasten.runtime.topology import DEFAULT_PORT

_ENV_FILE = ".hasten_deepspeed_env"


def _is_chosen(request: LaunchRequest) -> bool:
    launch = request.config.launch
    config = request.config
    names_deepspeed = (
        config.strategy == "deepspeed"
        and config.section(DeepSpeedPlugin).multinode_launcher != "standard"
    )
    return launch.launcher == "deepspeed" or (
        launch.launcher == "auto" and names_deepspeed
    )


def make_plan(request: LaunchRequest, host: Host) -> LaunchPlan:
    """Return a plan with one `deepspeed` command, which starts the machines of the hostfile through pdsh, MPI or SLURM.

    Raises: ConfigError without a hostfile, or with settings DeepSpeed's launcher has no option for.
    """
    launch = request.config.launch
    plugin = request.config.section(DeepSpeedPlugin)
    if plugin.hostfile is None:
        raise ConfigError(
            f"deepspeed.multinode_launcher={plugin.multinode_launcher!r} needs a hostfile. Give --deepspeed_hostfile, or use the "
            "standard launcher (the same hasten command on each machine)."
        )
    if launch.max_restarts:
        raise ConfigError(
            "DeepSpeed's launcher cannot restart processes. Use the standard launcher with max_restarts."
        )
    if request.target.no_python and request.target.module:
        raise ConfigError(
            "--module and --no_python contradict each other: a module needs Python. Give one of them."
        )
    per_machine = launch.processes_per_machine
    if per_machine is None and launch.num_processes is not None:
        per_machine = launch.num_processes // launch.num_machines
    shape = remote_shape(request, host, per_machine or max(1, host.num_devices))
    options = ["--hostfile", plugin.hostfile, "--launcher", plugin.multinode_launcher]
    options += ["--include", plugin.inclusion_filter] if plugin.inclusion_filter else []
    options += ["--exclude", plugin.exclusion_filter] if plugin.exclusion_filter else []
    if launch.num_machines > 1:
        options += ["--num_nodes", str(launch.num_machines)]
    if (
        per_machine is not None
        and not plugin.inclusion_filter
        and not plugin.exclusion_filter
    ):
        options += ["--num_gpus", str(per_machine)]
    if launch.main_process_ip:
        options += ["--master_addr", launch.main_process_ip]
    options += [
        "--master_port",
        str(launch.main_process_port or DEFAULT_PORT),
        "--no_local_rank",
    ]
    options += ["--module"] if request.target.module else []
    options += ["--no_python"] if request.target.no_python else []
    remote_variables = "".join(f"{name}={value}\n" for name, value in shape.env)
    return LaunchPlan(
        launcher="deepspeed",
        procs=(
            Proc(
                ("deepspeed", *options, request.target.name, *request.target.args),
                {"DS_ENV_FILE": _ENV_FILE},
            ),
        ),
        notes=(
            f"DeepSpeed's launcher starts the other machines; {_ENV_FILE} passes the settings to them",
            *shape.notes,
        ),
        files=(PlannedFile(_ENV_FILE, remote_variables),),
        supervision=supervision(request, shape),
        target=request.target,
    )


TARGET: Final = LaunchTarget(name="deepspeed", is_chosen=_is_chosen, plan=make_plan)
