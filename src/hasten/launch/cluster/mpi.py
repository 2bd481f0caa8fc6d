"""Launch plans for MPI: one mpirun command that starts the ranks of all hosts."""

from __future__ import annotations

import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Final

from hasten.errors import ConfigError
from hasten.launch.base import Host, LaunchPlan, LaunchRequest, LaunchTarget, Mpi, Proc
from hasten.launch.shape import check_memory, elsewhere, worker_argv
from hasten.launch.torchrun import supervision
from hasten.runtime.topology import DEFAULT_PORT


def _is_chosen(request: LaunchRequest) -> bool:
    launch = request.config.launch
    return launch.launcher == "mpi" or (
        launch.launcher == "auto" and launch.mpirun_hostfile is not None
    )


def _find_mpi(request: LaunchRequest, host: Host) -> Host:
    """Return the host with the installed MPI implementation and the hosts in the hostfile."""
    hostfile = request.config.launch.mpirun_hostfile
    try:
        hosts = read_hostfile(Path(hostfile).read_text()) if hostfile else ()
    except OSError as error:
        raise ConfigError(
            f"mpirun_hostfile={hostfile!r} cannot be read: {error.strerror}."
        ) from error
    try:
        done = subprocess.run(
            ["mpirun", "--version"], capture_output=True, text=True, timeout=20
        )
    # not installed here: the plan can still be shown
    except (OSError, subprocess.SubprocessError):
        return replace(host, mpi=Mpi(hosts=hosts))
    return replace(host, mpi=Mpi(kind_of(done.stdout + done.stderr), hosts))


def plan(request: LaunchRequest, host: Host) -> LaunchPlan:
    """Return a plan with one mpirun command that starts every rank; each rank reads its position from MPI's variables.

    Raises: ConfigError without a number of processes or a rendezvous address.
    """
    launch, mpi = request.config.launch, host.mpi
    machines = (
        launch.num_machines if launch.num_machines > 1 else max(1, len(mpi.hosts))
    )
    total = launch.num_processes or (launch.processes_per_machine or 0) * machines
    if not total:
        raise ConfigError(
            "mpirun needs the number of processes over all machines. Give --num_processes."
        )
    if total % machines:
        raise ConfigError(
            f"num_processes={total} cannot be split evenly over {machines} machines. Change one of them."
        )
    address = launch.main_process_ip or (mpi.hosts[0] if mpi.hosts else None)
    if address is None and machines > 1:
        raise ConfigError(
            f"{machines} machines need a rendezvous address. Give --main_process_ip, or --mpirun_hostfile, "
            f"whose first host is used."
        )
    per_machine = total // machines
    if machines == 1 and not mpi.hosts:
        check_memory(host, total)
    shape = elsewhere(request, host, per_machine)
    env = {
        **dict(shape.env),
        "MASTER_ADDR": address or "127.0.0.1",
        "MASTER_PORT": str(launch.main_process_port or DEFAULT_PORT),
    }
    if launch.mpirun_ccl is not None:
        env["CCL_WORKER_COUNT"] = str(launch.mpirun_ccl)
    argv = (
        *_mpirun(mpi, launch.mpirun_hostfile, total, per_machine, env),
        *worker_argv(request.target, host),
    )
    return LaunchPlan(
        launcher="mpi",
        procs=(Proc(argv),),
        notes=(
            f"{total} processes, {per_machine} on each machine ({machines}), by {mpi.kind}",
            *shape.notes,
        ),
        supervision=supervision(request, shape),
        target=request.target,
    )


TARGET: Final = LaunchTarget(
    name="mpi", is_chosen=_is_chosen, plan=plan, survey=_find_mpi
)


def _mpirun(
    mpi: Mpi, hostfile: str | None, total: int, per_machine: int, env: dict[str, str]
) -> list[str]:
    if mpi.kind == "openmpi":
        hosts = ["--hostfile", hostfile] if hostfile else []
        variables = [
            word
            for name, value in sorted(env.items())
            for word in ("-x", f"{name}={value}")
        ]
        return [
            "mpirun",
            *hosts,
            "-n",
            str(total),
            "--map-by",
            f"ppr:{per_machine}:node",
            "--bind-to",
            "none",
            *variables,
        ]
    hosts = ["-f", hostfile] if hostfile else []
    variables = [
        word for name, value in sorted(env.items()) for word in ("-genv", name, value)
    ]
    return ["mpirun", *hosts, "-n", str(total), "-ppn", str(per_machine), *variables]


def read_hostfile(text: str) -> tuple[str, ...]:
    """Return the host names of an MPI or DeepSpeed hostfile: first word of each line, without `:slots`."""
    lines = (line.split("#")[0].strip() for line in text.splitlines())
    return tuple(line.split()[0].partition(":")[0] for line in lines if line)


def kind_of(version_text: str) -> str:
    """Return the MPI implementation that printed `version_text`."""
    return (
        "openmpi"
        if "open mpi" in version_text.lower() or "open-mpi" in version_text.lower()
        else "mpich"
    )
