"""Launch plans for commands that start the other machines themselves: mpirun, and DeepSpeed's launcher."""

from __future__ import annotations

from dataclasses import dataclass

from hasten.errors import ConfigError
from hasten.launch.base import Host, LaunchPlan, LaunchRequest, PlannedFile, Proc
from hasten.launch.shape import check_memory, elsewhere, worker_argv
from hasten.launch.torchrun import supervision
from hasten.runtime.secret import TOKEN
from hasten.runtime.topology import DEFAULT_PORT

_ENV_FILE = ".hasten_deepspeed_env"


@dataclass(frozen=True, slots=True)
class Mpi:
    """The installed MPI implementation and the hosts in the hostfile."""

    kind: str = "openmpi"
    """openmpi, or mpich (also Intel MPI, MVAPICH and Cray, which share the options used here)."""
    hosts: tuple[str, ...] = ()


def plan_mpi(request: LaunchRequest, host: Host, mpi: Mpi) -> LaunchPlan:
    """Return a plan with one mpirun command that starts every rank; each rank reads its position from MPI's variables.

    Raises: ConfigError without a number of processes or a rendezvous address.
    """
    launch = request.config.launch
    machines = launch.num_machines if launch.num_machines > 1 else max(1, len(mpi.hosts))
    total = launch.num_processes or (launch.processes_per_machine or 0) * machines
    if not total:
        raise ConfigError("mpirun needs the number of processes over all machines. Give --num_processes.")
    if total % machines:
        raise ConfigError(f"num_processes={total} cannot be split evenly over {machines} machines. Change one of them.")
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
        *worker_argv(request.target, host, "hasten.launch.task"),
    )
    return LaunchPlan(
        launcher="mpi",
        procs=(Proc(argv),),
        notes=(f"{total} processes, {per_machine} on each machine ({machines}), by {mpi.kind}", *shape.notes),
        supervision=supervision(request, shape),
        target=request.target,
    )


def _mpirun(mpi: Mpi, hostfile: str | None, total: int, per_machine: int, env: dict[str, str]) -> list[str]:
    if mpi.kind == "openmpi":
        hosts = ["--hostfile", hostfile] if hostfile else []
        variables = [word for name, value in sorted(env.items()) for word in ("-x", f"{name}={value}")]
        variables += ["-x", TOKEN]  # by name: other users can read a command line. MPICH forwards the whole environment
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
    variables = [word for name, value in sorted(env.items()) for word in ("-genv", name, value)]
    return ["mpirun", *hosts, "-n", str(total), "-ppn", str(per_machine), *variables]


def read_hostfile(text: str) -> tuple[str, ...]:
    """Return the host names of an MPI or DeepSpeed hostfile: first word of each line, without `:slots`."""
    lines = (line.split("#")[0].strip() for line in text.splitlines())
    return tuple(line.split()[0].partition(":")[0] for line in lines if line)


def kind_of(version_text: str) -> str:
    """Return the MPI implementation that printed `version_text`."""
    return "openmpi" if "open mpi" in version_text.lower() or "open-mpi" in version_text.lower() else "mpich"


def plan_deepspeed(request: LaunchRequest, host: Host) -> LaunchPlan:
    """Return a plan with one `deepspeed` command, which starts the machines of the hostfile through pdsh, MPI or SLURM.

    Raises: ConfigError without a hostfile, or with settings DeepSpeed's launcher has no option for.
    """
    launch, engine = request.config.launch, request.config.deepspeed
    if engine.hostfile is None:
        raise ConfigError(
            f"deepspeed.multinode_launcher={engine.multinode_launcher!r} needs a hostfile. Give --deepspeed_hostfile, or use the "
            "standard launcher (the same hasten command on each machine)."
        )
    if launch.max_restarts:
        raise ConfigError("DeepSpeed's launcher cannot restart processes. Use the standard launcher with max_restarts.")
    if request.target.no_python and request.target.module:
        raise ConfigError("--module and --no_python contradict each other: a module needs Python. Give one of them.")
    per_machine = launch.processes_per_machine
    if per_machine is None and launch.num_processes is not None:
        per_machine = launch.num_processes // launch.num_machines
    shape = elsewhere(request, host, per_machine or max(1, host.num_devices))
    options = ["--hostfile", engine.hostfile, "--launcher", engine.multinode_launcher]
    options += ["--include", engine.inclusion_filter] if engine.inclusion_filter else []
    options += ["--exclude", engine.exclusion_filter] if engine.exclusion_filter else []
    if launch.num_machines > 1:
        options += ["--num_nodes", str(launch.num_machines)]
    if per_machine is not None and not engine.inclusion_filter and not engine.exclusion_filter:
        options += ["--num_gpus", str(per_machine)]
    if launch.main_process_ip:
        options += ["--master_addr", launch.main_process_ip]
    options += ["--master_port", str(launch.main_process_port or DEFAULT_PORT), "--no_local_rank"]
    options += ["--module"] if request.target.module else []
    options += ["--no_python"] if request.target.no_python else []
    remote = "".join(f"{name}={value}\n" for name, value in shape.env)
    return LaunchPlan(
        launcher="deepspeed",
        procs=(Proc(("deepspeed", *options, request.target.name, *request.target.args), {"DS_ENV_FILE": _ENV_FILE}),),
        notes=(
            f"DeepSpeed's launcher starts the other machines; {_ENV_FILE} passes the settings to them",
            *shape.notes,
        ),
        files=(PlannedFile(_ENV_FILE, remote),),
        supervision=supervision(request, shape),
        target=request.target,
    )
