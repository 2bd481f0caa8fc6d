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

from hasten.config.handoff import pack_settings
from hasten.config.root import Config
from hasten.config.source import SettingEntry, SettingSource
from hasten.errors import ConfigError, LaunchError, MissingPackageError
from hasten.extensions.survive.crew import Crew, print_message
from hasten.extensions.survive.replica_machines import (
    MachineClient,
    MachineNetwork,
    MachineServer,
    OneMachine,
    replicas_of_machine,
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

_LOCAL_ADDRESS: Final = "127.0.0.1"


def processes_per_replica(config: Config) -> int:
    """Return the number of processes of each replica: `num_processes` counts those of all replicas, over all machines.

    Raises: ConfigError if the replicas cannot have equally many.
    """
    launch = config.launch
    num_replicas = config.section(SurviveSettings).replicas
    num_processes = (
        launch.num_processes
        or (launch.processes_per_machine or 0) * launch.num_machines
        or num_replicas
    )
    if num_processes % num_replicas:
        raise ConfigError(
            f"num_processes={num_processes} counts the processes of all replicas, and --replicas {num_replicas} cannot have equally many of them. Give a multiple of "
            f"{num_replicas}, such as {num_replicas * 2} for replicas of 2 processes, or leave --num_processes out for replicas of one."
        )
    return num_processes // num_replicas


def settings_of_replica(config: Config) -> tuple[SettingEntry, ...]:
    """Return the settings of one replica, which is a run of its own on one machine."""
    source = SettingSource("code", "--replicas")
    num_processes = processes_per_replica(config)
    return (
        SettingEntry(("launch", "num_processes"), num_processes, source),
        SettingEntry(("launch", "processes_per_machine"), None, source),
        SettingEntry(
            ("launch", "launcher"),
            "single" if num_processes == 1 else "torchrun",
            source,
        ),
        SettingEntry(("launch", "num_machines"), 1, source),
        SettingEntry(("launch", "machine_rank"), None, source),
    )


def check_settings(config: Config) -> None:
    """Raise ConfigError unless the settings describe replicas of equally many processes."""
    launch = config.launch
    settings = config.section(SurviveSettings)
    num_replicas = settings.replicas
    min_replicas = settings.min_replicas
    if launch.nnodes is not None:
        raise ConfigError(
            f"--replicas {num_replicas} divides the replicas over a fixed number of machines, and nnodes={launch.nnodes} asks for a changing one. Give "
            "--num_machines: machines may be lost and return, and --min_replicas says how many replicas the run needs."
        )
    _check_machines(num_replicas, launch.num_machines)
    if launch.submit not in (None, "slurm") or launch.launcher not in (
        "auto",
        "single",
    ):
        raise ConfigError(
            f"--replicas {num_replicas} starts its processes itself, and submit={launch.submit}, launcher={launch.launcher!r} ask for something else to start "
            "them. Leave both out, and put the command into the job's script; for SLURM, --submit slurm writes one."
        )
    processes_per_replica(config)
    if min_replicas > num_replicas:
        raise ConfigError(
            f"--min_replicas {min_replicas} is more than --replicas {num_replicas}, so the run would wait forever. Give at most {num_replicas}."
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
    settings = request.config.section(SurviveSettings)
    # this process is one of the replicas
    if settings.replicas == 0 or settings.replica is not None:
        return False
    check_settings(request.config)
    # a batch script starts the replicas where it runs
    return request.config.launch.submit is None


def make_plan(request: LaunchRequest, host: Host) -> LaunchPlan:
    """Return the plan of one replica, with the rendezvous of the machines."""
    replica_entries = {
        setting_entry.path: setting_entry
        for setting_entry in settings_of_replica(request.config)
    }
    handoff = pack_settings({**request.entries, **replica_entries})
    shape = decide_shape(request, host)
    if shape.allocation.rank is not None:
        raise ConfigError(
            f"{shape.allocation.source} has started several tasks on this machine, and with --replicas one launcher for each machine starts the replicas. "
            "Start one task for each machine, such as srun --ntasks-per-node=1."
        )
    num_replicas = request.config.section(SurviveSettings).replicas
    _check_machines(num_replicas, shape.max_machines)
    plan_notes = list(shape.notes)
    meeting = torchrun.make_meeting(request, host, shape, plan_notes)
    if meeting.machine_rank is None and owns_address(meeting.address):
        meeting = replace(meeting, machine_rank=0)
    machine_rank = meeting.machine_rank
    if machine_rank is None:
        machine_replicas = "as machine 0 says"
    else:
        machine_replicas = _format_numbers(
            replicas_of_machine(num_replicas, meeting.max_machines, machine_rank)
        )
    plan_notes.append(f"replicas of this machine: {machine_replicas} of {num_replicas}")
    if shape.allocation.source:
        variables = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    else:
        variables = {}
    replica_shape = replace(shape, num_processes=1, notes=tuple(plan_notes))
    launch_plan = torchrun.plan_single(
        replace(request, handoff=handoff), host, replica_shape
    )
    num_processes = processes_per_replica(request.config)
    procs = tuple(
        replace(
            proc,
            env={**proc.env, environment.CONFIG: handoff, **variables},
            count=num_processes,
        )
        for proc in launch_plan.procs
    )
    return replace(launch_plan, procs=procs, meeting=meeting)


def _format_numbers(replica_numbers: range) -> str:
    if len(replica_numbers) == 1:
        return f"{replica_numbers[0]}"
    return f"{replica_numbers[0]} to {replica_numbers[-1]}"


def run_replicas(launch_plan: LaunchPlan, config: Config, host: Host) -> int:
    """Run the replicas of this machine until the run is over; return 0 if a replica, of any machine, has finished it."""
    meeting = launch_plan.meeting
    assert meeting is not None, "a plan of replicas has the rendezvous of its machines"
    num_replicas = config.section(SurviveSettings).replicas
    with (
        tempfile.TemporaryDirectory(prefix="hasten-replicas-") as folder,
        _connect_machines(launch_plan, config, host) as network,
    ):
        (proc,) = launch_plan.procs
        if meeting.alone:
            token_variables = secret.job_token(host.env)
        else:
            token_variables = {}
        variables = {
            **environment.snapshot(),
            **proc.env,
            **(token_variables),
            "HASTEN_SURVIVE_LIGHTHOUSE": network.lighthouse,
            "HASTEN_SURVIVE_FOLDER": folder,
            "HASTEN_REPLICAS": str(num_replicas),
            LAUNCHER_PID: str(os.getpid()),
        }
        if config.cpu:
            num_devices = 0
        else:
            num_devices = host.num_devices
        if 0 < num_devices < proc.count:
            raise ConfigError(
                f"each replica has {proc.count} processes, and this machine has {num_devices} device(s), so two processes of a replica would share one. Give "
                f"--num_processes at most {num_devices} for each replica, or --cpu."
            )
        replica_numbers = replicas_of_machine(
            num_replicas, meeting.max_machines, network.rank
        )
        crew = Crew(proc, variables, Path(folder), config, replica_numbers, network)
        crew.num_devices = num_devices
        crew.patience_s = meeting.join_timeout_s
        with crew.handle_signals():
            exit_code = crew.run_replicas()
        network.close(exit_code)
        return exit_code


LAUNCH_TARGET: Final = LaunchTarget(
    name="replicas",
    is_chosen=_is_chosen,
    plan=make_plan,
    survey=_check_torchft_is_installed,
    run=run_replicas,
    outlives_machines=lambda request: (
        request.config.section(SurviveSettings).replicas > 0
    ),
)


@contextmanager
def _connect_machines(
    launch_plan: LaunchPlan, config: Config, host: Host
) -> Iterator[MachineNetwork]:
    """Connect this machine to the others for the block; machine 0 also starts the lighthouse."""
    meeting = launch_plan.meeting
    assert meeting is not None, "a plan of replicas has the rendezvous of its machines"
    if meeting.alone:
        with _start_lighthouse(config, _LOCAL_ADDRESS) as lighthouse_address:
            yield OneMachine(lighthouse_address)
        return
    report = make_report(launch_plan, config, host, is_alone=False)
    token = secret.read_token(host.env) or secret.user_secret(host.env)
    if meeting.machine_rank != 0:
        yield MachineClient(meeting, report, token, print_message)
        return
    server = MachineServer(
        meeting, report, config.launch.check_in, token, print_message
    )
    with _start_lighthouse(
        config, str(socket.getaddrinfo(meeting.address, None)[0][4][0])
    ) as lighthouse_address:
        server.lighthouse = lighthouse_address
        yield server


@contextmanager
def _start_lighthouse(config: Config, host: str) -> Iterator[str]:
    """Start torchft's lighthouse at an address of this machine for the block; yields host and port."""
    settings = config.section(SurviveSettings)
    if settings.lighthouse is not None:
        yield settings.lighthouse
        return
    lighthouse_options = (
        host,
        str(settings.min_replicas),
        str(settings.timeout_s),
        str(settings.heartbeat_timeout_s),
    )
    child = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "hasten.extensions.survive.lighthouse",
            *lighthouse_options,
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=None if config.debug else subprocess.DEVNULL,
        start_new_session=True,
    )
    assert child.stdin is not None, "it is a pipe"
    assert child.stdout is not None, "it is a pipe"
    try:
        port_line = child.stdout.readline().decode().strip()
        if not port_line.isdigit():
            raise LaunchError(
                f"torchft's lighthouse did not start (it printed {port_line!r}), so the replicas could not find each other. Run the command again with "
                "--debug to see its messages."
            )
        yield f"[{host}]:{port_line}" if ":" in host else f"{host}:{port_line}"
    finally:
        child.stdin.close()  # it ends when this closes
        try:
            child.wait(5)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
        child.stdout.close()
