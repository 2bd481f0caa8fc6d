"""Launch plans for one process alone, and for several under torch's elastic agent, on one machine or many."""

from __future__ import annotations

import re
from typing import Final

from hasten.config.sections.launch import LaunchConfig
from hasten.errors import ConfigError
from hasten.launch.base import (
    Host,
    JobShape,
    LaunchPlan,
    LaunchRequest,
    Meeting,
    MeetingKind,
    Proc,
    Supervision,
)
from hasten.launch.shape import worker_argv
from hasten.runtime.topology import DEFAULT_PORT

_JOIN_TIMEOUT_S: Final = 120.0


def plan(request: LaunchRequest, host: Host, shape: JobShape) -> LaunchPlan:
    """Return the processes of this machine and the rendezvous with the others.

    Raises: ConfigError if the machines could not find each other with these settings.
    """
    worker_command = worker_argv(request.target, host)
    notes = list(shape.notes)
    check_tee(request.config.launch.tee, shape.num_processes)
    meeting = make_meeting(request, host, shape, notes)
    worker_variables = dict(shape.env)
    if meeting.kind == "c10d":
        # the shared store would give restarted workers stale addresses
        worker_variables["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    return LaunchPlan(
        launcher="torchrun",
        procs=(Proc(worker_command, worker_variables, shape.num_processes),),
        notes=tuple(notes),
        meeting=meeting,
        supervision=supervision(request, shape),
        target=request.target,
    )


def plan_single(request: LaunchRequest, host: Host, shape: JobShape) -> LaunchPlan:
    """Return a plan with one command and the settings in its environment, without the elastic agent and without torch."""
    proc = Proc(worker_argv(request.target, host), dict(shape.env))
    return LaunchPlan(
        launcher="single",
        procs=(proc,),
        notes=shape.notes,
        supervision=supervision(request, shape),
        target=request.target,
    )


def supervision(request: LaunchRequest, shape: JobShape) -> Supervision:
    """Return the agent's settings for the processes of this request."""
    launch_settings = request.config.launch
    return Supervision(
        max_restarts=launch_settings.max_restarts,
        monitor_interval_s=launch_settings.monitor_interval,
        stop_grace_s=launch_settings.stop_grace_s,
        role=launch_settings.role,
        log_dir=launch_settings.log_dir,
        tee=launch_settings.tee,
        quiet=launch_settings.quiet,
        debug=request.config.debug,
        expected_world_size=shape.expected_world_size,
        check_in=launch_settings.check_in,
    )


def make_meeting(
    request: LaunchRequest, host: Host, shape: JobShape, notes: list[str]
) -> Meeting:
    """Return the rendezvous of the machines; notes are added to `notes`."""
    launch_settings = request.config.launch
    rdzv_options = parse_options(launch_settings.rdzv_conf)
    timeout_s = _timeout_seconds(
        rdzv_options.pop("join_timeout", None) or rdzv_options.pop("timeout", None)
    )
    meeting_kind = _meeting_kind(launch_settings, shape, notes)
    address, port = _meeting_endpoint(launch_settings, shape)
    run_id = (
        launch_settings.rdzv_id
        or host.env.get("SLURM_JOB_ID")
        or host.env.get("JOBSET_NAME")
        or "hasten"
    )
    if shape.min_machines != shape.max_machines and launch_settings.max_restarts == 0:
        notes.append(
            "max_restarts=0: losing a machine ends the job; set --max_restarts to continue with the others"
        )
    if not launch_settings.same_network and shape.max_machines > 1:
        notes.append(
            f"same_network=false has no effect: every machine must reach {address}:{port}"
        )
    if rdzv_options and meeting_kind == "fixed":
        raise ConfigError(
            f"rdzv_conf has {', '.join(sorted(rdzv_options))}, which the static rendezvous does not support; it supports join_timeout. "
            "Remove them, or choose --rdzv_backend c10d."
        )
    return Meeting(
        kind=meeting_kind,
        min_machines=shape.min_machines,
        max_machines=shape.max_machines,
        machine_rank=shape.machine_rank,
        address=address,
        port=port,
        run_id=run_id,
        join_timeout_s=timeout_s,
        options=rdzv_options,
    )


def _meeting_kind(
    launch_settings: LaunchConfig, shape: JobShape, notes: list[str]
) -> MeetingKind:
    if launch_settings.rdzv_backend == "c10d":
        return "c10d"
    if shape.min_machines == shape.max_machines:
        return "fixed"
    notes.append("the number of machines may change: the rendezvous uses c10d")
    return "c10d"


def _meeting_endpoint(
    launch_settings: LaunchConfig, shape: JobShape
) -> tuple[str, int]:
    """Return the address and port of machine 0."""
    endpoint_host, _, port_text = (launch_settings.rdzv_endpoint or "").rpartition(":")
    if launch_settings.rdzv_endpoint and not (endpoint_host and port_text.isdecimal()):
        raise ConfigError(
            f"rdzv_endpoint={launch_settings.rdzv_endpoint!r} is not host:port, such as 10.0.0.1:29500."
        )
    rendezvous_host = (
        launch_settings.main_process_ip or endpoint_host or shape.allocation.address
    )
    rendezvous_port = launch_settings.main_process_port
    if rendezvous_port is None and port_text:
        rendezvous_port = int(port_text)
    if shape.max_machines == 1:
        return rendezvous_host or "127.0.0.1", rendezvous_port or 0
    if rendezvous_host is None:
        raise ConfigError(
            f"{shape.max_machines} machines need a rendezvous address. Give every machine the same "
            f"--main_process_ip (the address of machine 0); under SLURM start with srun and it is read."
        )
    if rendezvous_port == 0:
        raise ConfigError(
            "main_process_port=0 picks a free port on one machine, which the other machines cannot know. "
            "Give all machines the same --main_process_port."
        )
    return rendezvous_host, rendezvous_port or shape.allocation.port or DEFAULT_PORT


def check_tee(tee_text: str | None, num_processes: int) -> None:
    """Raise unless `tee` is valid and names only local ranks that this machine starts.

    Raises: ConfigError otherwise.
    """
    if tee_text is None:
        return
    is_valid = re.fullmatch(r"[0-3]|\d+:[0-3](,\d+:[0-3])*", tee_text)
    if is_valid is None:
        raise ConfigError(
            f"tee={tee_text!r} is neither 0, 1, 2 or 3 (none, stdout, stderr, both) nor a list of rank:n such as 0:3,1:2, so it is "
            f"unclear what to print; correct it."
        )
    absent_ranks = []
    for rank_mode in tee_text.split(","):
        if ":" in rank_mode and int(rank_mode.partition(":")[0]) >= num_processes:
            absent_ranks.append(rank_mode)
    if absent_ranks:
        raise ConfigError(
            f"tee={tee_text!r} names local rank {absent_ranks[0].partition(':')[0]}, but this machine starts {num_processes} process(es), "
            f"counted from 0; name ranks below {num_processes}."
        )


def parse_options(options_text: str | None) -> dict[str, str]:
    """Return the pairs in `a=1,b=2`.

    Raises: ConfigError for an item that is not a pair.
    """
    pairs: dict[str, str] = {}
    for pair in (options_text or "").split(","):
        if not pair.strip():
            continue
        option_name, equals, option_value = pair.partition("=")
        if not equals or not option_name.strip():
            raise ConfigError(f"rdzv_conf={options_text!r}: {pair!r} is not key=value.")
        pairs[option_name.strip()] = option_value.strip()
    return pairs


def _timeout_seconds(text: str | None) -> float:
    if text is None:
        return _JOIN_TIMEOUT_S
    try:
        return float(text)
    except ValueError as error:
        raise ConfigError(
            f"rdzv_conf join_timeout={text!r} is not a number of seconds."
        ) from error
