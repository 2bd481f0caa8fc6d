"""Launch of replicas that may be lost: one or several processes each, a lighthouse for all, and new processes for each lost one."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Final

from hasten.config.handoff import pack
from hasten.config.root import Config
from hasten.config.source import SettingEntry, SettingSource
from hasten.errors import ConfigError, LaunchError, MissingPackageError
from hasten.extensions.survive.crew import Crew, say
from hasten.extensions.survive.replica_machines import (
    MachineClient,
    MachineNetwork,
    MachineServer,
    OneMachine,
    own_replicas,
)
from hasten.extensions.survive.settings import SurviveSettings
from hasten.launch import torchrun
from hasten.launch.base import Host, LaunchPlan, LaunchRequest, LaunchTarget
from hasten.launch.checkin import make_report
from hasten.launch.network import owns_address
from hasten.launch.shape import decide_shape
from hasten.launch.worker import LAUNCHER_PID
from hasten.optional import check_installed
from hasten.runtime import env as environment
from hasten.runtime import secret

_LOCAL: Final = "127.0.0.1"


def per_replica(config: Config) -> int:
    """Return the number of processes of each replica: `num_processes` counts those of all replicas, over all machines.

    Raises: ConfigError if the replicas cannot have equally many.
    """
    launch, replicas = config.launch, config.section(SurviveSettings).replicas
    count = (
        launch.num_processes
        or (launch.processes_per_machine or 0) * launch.num_machines
        or replicas
    )
    if count % replicas:
        raise ConfigError(
            f"num_processes={count} counts the processes of all replicas, and --replicas {replicas} cannot have equally many of them. Give a multiple of "
            f"{replicas}, such as {replicas * 2} for replicas of 2 processes, or leave --num_processes out for replicas of one."
        )
    return count // replicas


def one_replica(config: Config) -> tuple[SettingEntry, ...]:
    """Return the settings of one replica, which is a run of its own on one machine."""
    source, count = SettingSource("code", "--replicas"), per_replica(config)
    return (
        SettingEntry(("launch", "num_processes"), count, source),
        SettingEntry(("launch", "processes_per_machine"), None, source),
        SettingEntry(
            ("launch", "launcher"), "single" if count == 1 else "torchrun", source
        ),
        SettingEntry(("launch", "num_machines"), 1, source),
        SettingEntry(("launch", "machine_rank"), None, source),
    )


def check(config: Config) -> None:
    """Raise ConfigError unless the settings describe replicas of equally many processes."""
    launch, survive = config.launch, config.section(SurviveSettings)
    replicas, min_replicas = survive.replicas, survive.min_replicas
    if launch.nnodes is not None:
        raise ConfigError(
            f"--replicas {replicas} divides the replicas over a fixed number of machines, and nnodes={launch.nnodes} asks for a changing one. Give "
            "--num_machines: machines may be lost and return, and --min_replicas says how many replicas the run needs."
        )
    _check_machines(replicas, launch.num_machines)
    if launch.submit not in (None, "slurm") or launch.launcher not in (
        "auto",
        "single",
    ):
        raise ConfigError(
            f"--replicas {replicas} starts its processes itself, and submit={launch.submit}, launcher={launch.launcher!r} ask for something else to start "
            "them. Leave both out, and put the command into the job's script; for SLURM, --submit slurm writes one."
        )
    per_replica(config)
    if min_replicas > replicas:
        raise ConfigError(
            f"--min_replicas {min_replicas} is more than --replicas {replicas}, so the run would wait forever. Give at most {replicas}."
        )


def _check_torchft_is_installed(request: LaunchRequest, host: Host) -> Host:
    try:
        check_installed("torchft", why="replicas that may be lost (--replicas)")
    except MissingPackageError as error:
        raise ConfigError(str(error)) from error
    return host


def _check_machines(replicas: int, machines: int) -> None:
    if machines > replicas:
        raise ConfigError(
            f"--replicas {replicas} leaves some of the {machines} machines without a replica. Give at least as many replicas as machines."
        )


def _is_chosen(request: LaunchRequest) -> bool:
    survive = request.config.section(SurviveSettings)
    # this process is one of the replicas
    if survive.replicas == 0 or survive.replica is not None:
        return False
    check(request.config)
    # a batch script starts the replicas where it runs
    return request.config.launch.submit is None


def make_plan(request: LaunchRequest, host: Host) -> LaunchPlan:
    """Return the plan of one replica, with the rendezvous of the machines."""
    replica_entries = {entry.path: entry for entry in one_replica(request.config)}
    handoff = pack({**request.entries, **replica_entries})
    shape = decide_shape(request, host)
    if shape.allocation.rank is not None:
        raise ConfigError(
            f"{shape.allocation.source} has started several tasks on this machine, and with --replicas one launcher for each machine starts the replicas. "
            "Start one task for each machine, such as srun --ntasks-per-node=1."
        )
    replicas = request.config.section(SurviveSettings).replicas
    _check_machines(replicas, shape.max_machines)
    notes = list(shape.notes)
    meeting = torchrun.make_meeting(request, host, shape, notes)
    if meeting.machine_rank is None and owns_address(meeting.address):
        meeting = replace(meeting, machine_rank=0)
    rank = meeting.machine_rank
    here = (
        "as machine 0 says"
        if rank is None
        else _names(own_replicas(replicas, meeting.max_machines, rank))
    )
    notes.append(f"replicas of this machine: {here} of {replicas}")
    variables = (
        {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
        if shape.allocation.source
        else {}
    )
    one = replace(shape, num_processes=1, notes=tuple(notes))
    plan = torchrun.plan_single(replace(request, handoff=handoff), host, one)
    count = per_replica(request.config)
    procs = tuple(
        replace(
            proc,
            env={**proc.env, environment.CONFIG: handoff, **variables},
            count=count,
        )
        for proc in plan.procs
    )
    return replace(plan, procs=procs, meeting=meeting)


def _names(numbers: range) -> str:
    return f"{numbers[0]}" if len(numbers) == 1 else f"{numbers[0]} to {numbers[-1]}"


def run(plan: LaunchPlan, config: Config, host: Host) -> int:
    """Run the replicas of this machine until the run is over; return 0 if a replica, of any machine, has finished it."""
    meeting = plan.meeting
    assert meeting is not None, "a plan of replicas has the rendezvous of its machines"
    replicas = config.section(SurviveSettings).replicas
    with (
        tempfile.TemporaryDirectory(prefix="hasten-replicas-") as folder,
        _network(plan, config, host) as network,
    ):
        (proc,) = plan.procs
        common = {
            **environment.snapshot(),
            **proc.env,
            **(secret.job_token(host.env) if meeting.alone else {}),
            "HASTEN_SURVIVE_LIGHTHOUSE": network.lighthouse,
            "HASTEN_SURVIVE_FOLDER": folder,
            "HASTEN_REPLICAS": str(replicas),
            LAUNCHER_PID: str(os.getpid()),
        }
        devices = 0 if config.cpu else host.num_devices
        if 0 < devices < proc.count:
            raise ConfigError(
                f"each replica has {proc.count} processes, and this machine has {devices} device(s), so two processes of a replica would share one. Give "
                f"--num_processes at most {devices} for each replica, or --cpu."
            )
        numbers = own_replicas(replicas, meeting.max_machines, network.rank)
        crew = Crew(proc, common, Path(folder), config, numbers, network)
        crew.num_devices = devices
        crew.patience_s = meeting.join_timeout_s
        with crew.stopping():
            code = crew.run()
        network.close(code)
        return code


TARGET: Final = LaunchTarget(
    name="replicas",
    is_chosen=_is_chosen,
    plan=make_plan,
    survey=_check_torchft_is_installed,
    run=run,
    outlives_machines=lambda request: (
        request.config.section(SurviveSettings).replicas > 0
    ),
)


@contextmanager
def _network(plan: LaunchPlan, config: Config, host: Host) -> Iterator[MachineNetwork]:
    """Connect this machine to the others for the block; machine 0 also starts the lighthouse."""
    meeting = plan.meeting
    assert meeting is not None, "a plan of replicas has the rendezvous of its machines"
    if meeting.alone:
        with _lighthouse(config, _LOCAL) as address:
            yield OneMachine(address)
        return
    report = make_report(plan, config, host, is_alone=False)
    token = secret.read_token(host.env) or secret.user_secret(host.env)
    if meeting.machine_rank != 0:
        yield MachineClient(meeting, report, token, say)
        return
    server = MachineServer(meeting, report, config.launch.check_in, token, say)
    with _lighthouse(
        config, str(socket.getaddrinfo(meeting.address, None)[0][4][0])
    ) as address:
        server.lighthouse = address
        yield server


@contextmanager
def _lighthouse(config: Config, host: str) -> Iterator[str]:
    """Start torchft's lighthouse at an address of this machine for the block; yields host and port."""
    survive = config.section(SurviveSettings)
    if survive.lighthouse is not None:
        yield survive.lighthouse
        return
    options = (
        host,
        str(survive.min_replicas),
        str(survive.timeout_s),
        str(survive.heartbeat_timeout_s),
    )
    child = subprocess.Popen(
        [sys.executable, "-m", "hasten.extensions.survive.lighthouse", *options],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=None if config.debug else subprocess.DEVNULL,
        start_new_session=True,
    )
    assert child.stdin is not None, "it is a pipe"
    assert child.stdout is not None, "it is a pipe"
    try:
        line = child.stdout.readline().decode().strip()
        if not line.isdigit():
            raise LaunchError(
                f"torchft's lighthouse did not start (it printed {line!r}), so the replicas could not find each other. Run the command again with "
                "--debug to see its messages."
            )
        yield f"[{host}]:{line}" if ":" in host else f"{host}:{line}"
    finally:
        child.stdin.close()  # it ends when this closes
        try:
            child.wait(5)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
        child.stdout.close()
