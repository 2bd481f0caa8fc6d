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
    argv = worker_argv(request.target, host)
    notes = list(shape.notes)
    check_tee(request.config.launch.tee, shape.num_processes)
    meeting = make_meeting(request, host, shape, notes)
    env = dict(shape.env)
    if meeting.kind == "c10d":
        # the shared store would give restarted workers stale addresses
        env["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    return LaunchPlan(
        launcher="torchrun",
        procs=(Proc(argv, env, shape.num_processes),),
        notes=tuple(notes),
        meeting=meeting,
        supervision=supervision(request, shape),
        target=request.target,
    )


def plan_single(request: LaunchRequest, host: Host, shape: JobShape) -> LaunchPlan:
    """Return a plan with one command and the settings in its environment, without the elastic agent and without torch."""
    return LaunchPlan(
        launcher="single",
        procs=(Proc(worker_argv(request.target, host), dict(shape.env)),),
        notes=shape.notes,
        supervision=supervision(request, shape),
        target=request.target,
    )


def supervision(request: LaunchRequest, shape: JobShape) -> Supervision:
    """Return the agent's settings for the processes of this request."""
    launch = request.config.launch
    return Supervision(
        max_restarts=launch.max_restarts,
        monitor_interval_s=launch.monitor_interval,
        stop_grace_s=launch.stop_grace_s,
        role=launch.role,
        log_dir=launch.log_dir,
        tee=launch.tee,
        quiet=launch.quiet,
        debug=request.config.debug,
        expected_world_size=shape.expected_world_size,
        check_in=launch.check_in,
    )


def make_meeting(
    request: LaunchRequest, host: Host, shape: JobShape, notes: list[str]
) -> Meeting:
    """Return the rendezvous of the machines; notes are added to `notes`."""
    launch = request.config.launch
    options = parse_options(launch.rdzv_conf)
    timeout_s = _seconds(
        options.pop("join_timeout", None) or options.pop("timeout", None)
    )
    kind = _kind(launch, shape, notes)
    address, port = _endpoint(launch, shape)
    run_id = (
        launch.rdzv_id
        or host.env.get("SLURM_JOB_ID")
        or host.env.get("JOBSET_NAME")
        or "hasten"
    )
    if shape.min_machines != shape.max_machines and launch.max_restarts == 0:
        notes.append(
            "max_restarts=0: losing a machine ends the job; set --max_restarts to continue with the others"
        )
    if not launch.same_network and shape.max_machines > 1:
        notes.append(
            f"same_network=false has no effect: every machine must reach {address}:{port}"
        )
    if options and kind == "fixed":
        raise ConfigError(
            f"rdzv_conf has {', '.join(sorted(options))}, which the static rendezvous does not support; it supports join_timeout. "
            "Remove them, or choose --rdzv_backend c10d."
        )
    return Meeting(
        kind=kind,
        min_machines=shape.min_machines,
        max_machines=shape.max_machines,
        machine_rank=shape.machine_rank,
        address=address,
        port=port,
        run_id=run_id,
        join_timeout_s=timeout_s,
        options=options,
    )


def _kind(launch: LaunchConfig, shape: JobShape, notes: list[str]) -> MeetingKind:
    if launch.rdzv_backend == "c10d":
        return "c10d"
    if shape.min_machines == shape.max_machines:
        return "fixed"
    notes.append("the number of machines may change: the rendezvous uses c10d")
    return "c10d"


def _endpoint(launch: LaunchConfig, shape: JobShape) -> tuple[str, int]:
    """Return the address and port of machine 0."""
    host, _, port_text = (launch.rdzv_endpoint or "").rpartition(":")
    if launch.rdzv_endpoint and not (host and port_text.isdecimal()):
        raise ConfigError(
            f"rdzv_endpoint={launch.rdzv_endpoint!r} is not host:port, such as 10.0.0.1:29500."
        )
    address = launch.main_process_ip or host or shape.allocation.address
    port = launch.main_process_port
    if port is None and port_text:
        port = int(port_text)
    if shape.max_machines == 1:
        return address or "127.0.0.1", port or 0
    if address is None:
        raise ConfigError(
            f"{shape.max_machines} machines need a rendezvous address. Give every machine the same "
            f"--main_process_ip (the address of machine 0); under SLURM start with srun and it is read."
        )
    if port == 0:
        raise ConfigError(
            "main_process_port=0 picks a free port on one machine, which the other machines cannot know. "
            "Give all machines the same --main_process_port."
        )
    return address, port or shape.allocation.port or DEFAULT_PORT


def check_tee(text: str | None, num_processes: int) -> None:
    """Raise unless `tee` is valid and names only local ranks that this machine starts.

    Raises: ConfigError otherwise.
    """
    if text is None:
        return
    is_valid = re.fullmatch(r"[0-3]|\d+:[0-3](,\d+:[0-3])*", text)
    if is_valid is None:
        raise ConfigError(
            f"tee={text!r} is neither 0, 1, 2 or 3 (none, stdout, stderr, both) nor a list of rank:n such as 0:3,1:2, so it is "
            f"unclear what to print; correct it."
        )
    absent = [
        rank_mode
        for rank_mode in text.split(",")
        if ":" in rank_mode and int(rank_mode.partition(":")[0]) >= num_processes
    ]
    if absent:
        raise ConfigError(
            f"tee={text!r} names local rank {absent[0].partition(':')[0]}, but this machine starts {num_processes} process(es), "
            f"counted from 0; name ranks below {num_processes}."
        )


def parse_options(text: str | None) -> dict[str, str]:
    """Return the pairs in `a=1,b=2`.

    Raises: ConfigError for an item that is not a pair.
    """
    pairs: dict[str, str] = {}
    for pair in (text or "").split(","):
        if not pair.strip():
            continue
        name, equals, value = pair.partition("=")
        if not equals or not name.strip():
            raise ConfigError(f"rdzv_conf={text!r}: {pair!r} is not key=value.")
        pairs[name.strip()] = value.strip()
    return pairs


def _seconds(text: str | None) -> float:
    if text is None:
        return _JOIN_TIMEOUT_S
    try:
        return float(text)
    except ValueError as error:
        raise ConfigError(
            f"rdzv_conf join_timeout={text!r} is not a number of seconds."
        ) from error
