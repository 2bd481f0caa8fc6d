"""Launch plans for MPI: one mpirun command that starts the ranks of all hosts."""

from __future__ import annotations

import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Final

from hasten.errors import ConfigError
from hasten.launch.base import Host, LaunchPlan, LaunchRequest, LaunchTarget, Mpi, Proc
from hasten.launch.shape import check_memory, remote_shape, worker_argv
from hasten.launch.torchrun import supervision
from hasten.runtime.topology import DEFAULT_PORT


def _is_chosen(request: LaunchRequest) -> bool:
    launch_settings = request.config.launch
    return launch_settings.launcher == "mpi" or (
        launch_settings.launcher == "auto"
        and launch_settings.mpirun_hostfile is not None
    )


def _find_mpi(request: LaunchRequest, host: Host) -> Host:
    """Return the host with the installed MPI implementation and the hosts in the hostfile."""
    hostfile = request.config.launch.mpirun_hostfile
    try:
        if hostfile:
            hostfile_hosts = read_hostfile(Path(hostfile).read_text())
        else:
            hostfile_hosts = ()
    except OSError as error:
        raise ConfigError(
            f"mpirun_hostfile={hostfile!r} cannot be read: {error.strerror}."
        ) from error
    try:
        version_run = subprocess.run(
            ["mpirun", "--version"], capture_output=True, text=True, timeout=20
        )
    # not installed here: the plan can still be shown
    except (OSError, subprocess.SubprocessError):
        return replace(host, mpi=Mpi(hosts=hostfile_hosts))
    return replace(
        host, mpi=Mpi(mpi_kind(version_run.stdout + version_run.stderr), hostfile_hosts)
    )


def plan_mpirun(request: LaunchRequest, host: Host) -> LaunchPlan:
    """Return a plan with one mpirun command that starts every rank; each rank reads its position from MPI's variables.

    Raises: ConfigError without a number of processes or a rendezvous address.
    """
    launch_settings = request.config.launch
    mpi = host.mpi
    if launch_settings.num_machines > 1:
        num_machines = launch_settings.num_machines
    else:
        num_machines = max(1, len(mpi.hosts))
    num_processes = (
        launch_settings.num_processes
        or (launch_settings.processes_per_machine or 0) * num_machines
    )
    if not num_processes:
        raise ConfigError(
            "mpirun needs the number of processes over all machines. Give --num_processes."
        )
    if num_processes % num_machines:
        raise ConfigError(
            f"num_processes={num_processes} cannot be split evenly over {num_machines} machines. Change one of them."
        )
    rendezvous_host = launch_settings.main_process_ip or (
        mpi.hosts[0] if mpi.hosts else None
    )
    if rendezvous_host is None and num_machines > 1:
        raise ConfigError(
            f"{num_machines} machines need a rendezvous address. Give --main_process_ip, or --mpirun_hostfile, "
            f"whose first host is used."
        )
    per_machine = num_processes // num_machines
    if num_machines == 1 and not mpi.hosts:
        check_memory(host, num_processes)
    job_shape = remote_shape(request, host, per_machine)
    rank_variables = {
        **dict(job_shape.env),
        "MASTER_ADDR": rendezvous_host or "127.0.0.1",
        "MASTER_PORT": str(launch_settings.main_process_port or DEFAULT_PORT),
    }
    if launch_settings.mpirun_ccl is not None:
        rank_variables["CCL_WORKER_COUNT"] = str(launch_settings.mpirun_ccl)
    mpirun_argv = (
        *_mpirun_words(
            mpi,
            launch_settings.mpirun_hostfile,
            num_processes,
            per_machine,
            rank_variables,
        ),
        *worker_argv(request.target, host),
    )
    return LaunchPlan(
        launcher="mpi",
        procs=(Proc(mpirun_argv),),
        notes=(
            f"{num_processes} processes, {per_machine} on each machine ({num_machines}), by {mpi.kind}",
            *job_shape.notes,
        ),
        supervision=supervision(request, job_shape),
        target=request.target,
    )


TARGET: Final = LaunchTarget(
    name="mpi", is_chosen=_is_chosen, plan=plan_mpirun, survey=_find_mpi
)


def _mpirun_words(
    mpi: Mpi,
    hostfile: str | None,
    num_processes: int,
    per_machine: int,
    rank_variables: dict[str, str],
) -> list[str]:
    if mpi.kind == "openmpi":
        host_words = ["--hostfile", hostfile] if hostfile else []
        variable_words = []
        for variable_name, variable_value in sorted(rank_variables.items()):
            variable_words += ["-x", f"{variable_name}={variable_value}"]
        return [
            "mpirun",
            *host_words,
            "-n",
            str(num_processes),
            "--map-by",
            f"ppr:{per_machine}:node",
            "--bind-to",
            "none",
            *variable_words,
        ]
    host_words = ["-f", hostfile] if hostfile else []
    variable_words = []
    for variable_name, variable_value in sorted(rank_variables.items()):
        variable_words += ["-genv", variable_name, variable_value]
    return [
        "mpirun",
        *host_words,
        "-n",
        str(num_processes),
        "-ppn",
        str(per_machine),
        *variable_words,
    ]


def read_hostfile(text: str) -> tuple[str, ...]:
    """Return the host names of an MPI or DeepSpeed hostfile: first word of each line, without `:slots`."""
    hosts: list[str] = []
    for line in text.splitlines():
        words = line.partition("#")[0].split()
        if words:
            hosts.append(words[0].partition(":")[0])
    return tuple(hosts)


def mpi_kind(version_text: str) -> str:
    """Return the MPI implementation that printed `version_text`."""
    if "open mpi" in version_text.lower() or "open-mpi" in version_text.lower():
        return "openmpi"
    return "mpich"
