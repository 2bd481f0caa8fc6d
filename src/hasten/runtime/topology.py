"""Rank, world size and node of this process, parsed from the launcher's environment variables. Does not import torch.

Sources in order of precedence: RANK and WORLD_SIZE (torchrun, the Kubernetes torch operator, anything that
sets torch's variables), MPI (Open MPI, MVAPICH, MPICH and Intel MPI, Cray PALS), SLURM's srun, XLA, PET_* and
JOB_COMPLETION_INDEX (a Kubernetes pod in which torchrun was not called). MPI precedes SLURM because mpirun inside a SLURM job
starts its daemons with srun, whose variables then describe the daemons, not the workers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, Literal

from hasten.errors import TopologyError
from hasten.runtime.nodelist import expand_tasks, first_host


def read_number(env: Mapping[str, str], name: str) -> int | None:
    """Return the whole number in variable `name`; None if it is not set."""
    number_text = env.get(name)
    if number_text is None:
        return None
    if not number_text.strip().isdecimal():
        raise TopologyError(
            f"{name}={number_text!r} is not a whole number, so this process does not know its place in the job. "
            f"Correct {name}, or unset it if it is left over from another launcher."
        )
    return int(number_text)


def read_first(env: Mapping[str, str], *names: str) -> int | None:
    """Return the number in the first variable of `names` that is set."""
    for name in names:
        if name in env:
            return read_number(env, name)
    return None


def read_companion(env: Mapping[str, str], beside: str, *names: str) -> int:
    """Return the number in the first of `names` that is set; one is required because `beside` is set."""
    companion_number = read_first(env, *names)
    if companion_number is None:
        raise TopologyError(
            f"{beside}={env.get(beside)} is set but {names[-1]} is not, so the place of this process in the job is unclear. "
            f"Export {names[-1]} as well, or unset {beside} to run alone."
        )
    return companion_number


def contradiction_error(
    env: Mapping[str, str], name: str, other_name: str, reason: str
) -> TopologyError:
    """Return the error for two variables that contradict each other."""
    return TopologyError(
        f"{name}={env.get(name)} contradicts {other_name}={env.get(other_name)}: {reason}. "
        f"Make them agree, or unset those that another launcher left behind."
    )


Source = Literal["single", "torch", "kubernetes", "slurm", "mpi", "xla"]

DEFAULT_PORT: Final = 29500
_LOOPBACK: Final = ("localhost", "127.0.0.1", "::1")


@dataclass(frozen=True, slots=True)
class Topology:
    """Position of this process in the job. `rendezvous` is the rendezvous address, None if unknown."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    node_rank: int = 0
    rendezvous: str | None = None
    source: Source = "single"
    restart_count: int = 0
    """Number of restarts of the workers: part of every key in a store that outlives them."""
    note: str = ""
    """Explanation of an interpretation of the environment that may be unexpected."""

    def __post_init__(self) -> None:
        for name, rank, size_name, size in (
            ("rank", self.rank, "world_size", self.world_size),
            ("local_rank", self.local_rank, "local_world_size", self.local_world_size),
        ):
            if size < 1 or not 0 <= rank < size:
                raise TopologyError(
                    f"{name}={rank} with {size_name}={size} is impossible (read from {self.source} variables): ranks count from 0 to "
                    f"{size_name}-1. Make the variables agree, or unset those that another launcher left behind."
                )
        if self.local_world_size > self.world_size:
            raise TopologyError(
                f"local_world_size={self.local_world_size} exceeds world_size={self.world_size} (read from "
                f"{self.source} variables): a node cannot hold more processes than the job. "
                f"Make the variables agree, or unset those that another launcher left behind."
            )
        if self.node_rank < 0:
            raise TopologyError(
                f"node_rank={self.node_rank} is negative; nodes are counted from 0."
            )

    @classmethod
    def from_env(cls, env: Mapping[str, str]) -> Topology:
        """Return the topology described by `env`; a single process if nothing describes one.

        Raises: TopologyError with the variable and its value if it is not a number, its companion is missing,
        or it contradicts another variable.
        """
        for variable_names, parse_variables in _SOURCES:
            topology = None if variable_names.isdisjoint(env) else parse_variables(env)
            if topology is not None:
                return topology
        return cls()

    @property
    def is_main(self) -> bool:
        """True on rank 0."""
        return self.rank == 0

    @property
    def is_local_main(self) -> bool:
        """True on the first process of its node."""
        return self.local_rank == 0

    def meeting_point(self) -> str:
        """Return the rendezvous address in the form that init_process_group takes.

        Raises: TopologyError if there are several processes but no address.
        """
        if self.rendezvous is None:
            raise TopologyError(
                f"rank {self.rank} of {self.world_size} ({self.source}) has no address at which the processes could meet. "
                f"Export MASTER_ADDR (the host of rank 0) and MASTER_PORT (a free port there) on every node."
            )
        return self.rendezvous


def _parse_torch(env: Mapping[str, str]) -> Topology | None:
    """Return the topology in RANK and WORLD_SIZE, with or without LOCAL_RANK; None where LOCAL_RANK=-1 stands alone."""
    # scripts for several processes say so that there is one
    if env.get("LOCAL_RANK") == "-1" and "RANK" not in env:
        return None
    rank = read_companion(env, "LOCAL_RANK", "RANK")
    world_size = read_companion(env, "RANK", "WORLD_SIZE")
    if "LOCAL_RANK" not in env:
        return _parse_torch_without_local_rank(env, rank, world_size)
    local_world_size = _local_world_size(env, world_size)
    node_rank = read_first(env, "GROUP_RANK", "NODE_RANK", "PET_NODE_RANK")
    num_nodes = read_number(env, "GROUP_WORLD_SIZE")
    if node_rank is None:
        node_rank = rank // local_world_size
    elif num_nodes is not None and node_rank >= num_nodes:
        raise contradiction_error(
            env,
            "GROUP_RANK",
            "GROUP_WORLD_SIZE",
            "a node's number is below the number of nodes",
        )
    return Topology(
        rank=rank,
        world_size=world_size,
        local_rank=read_companion(env, "RANK", "LOCAL_RANK"),
        local_world_size=local_world_size,
        node_rank=node_rank,
        rendezvous=_rendezvous_url(env, is_alone=local_world_size == world_size),
        source="torch",
        restart_count=read_number(env, "TORCHELASTIC_RESTART_COUNT") or 0,
    )


def _parse_torch_without_local_rank(
    env: Mapping[str, str], rank: int, world_size: int
) -> Topology:
    """Return the topology of one process per pod, or of several started manually on one machine."""
    per_node = env.get("PET_NPROC_PER_NODE", "1")
    if per_node != "1":
        raise TopologyError(
            f"RANK={rank} numbers this pod, and PET_NPROC_PER_NODE={per_node!r} asks for several processes in it, but LOCAL_RANK "
            f"is not set: the pod's command did not start them. Run the script under torchrun or `hasten launch`."
        )
    if env.get("MASTER_ADDR") in _LOOPBACK and "KUBERNETES_SERVICE_HOST" not in env:
        return Topology(
            rank=rank,
            world_size=world_size,
            local_rank=rank,
            local_world_size=world_size,
            rendezvous=_rendezvous_url(env, is_alone=world_size == 1),
            source="torch",
            note="RANK is set without LOCAL_RANK: MASTER_ADDR is this machine, so every rank is on it",
        )
    return Topology(
        rank=rank,
        world_size=world_size,
        node_rank=rank,
        rendezvous=_rendezvous_url(env, is_alone=world_size == 1),
        source="kubernetes",
        note="RANK is set without LOCAL_RANK: one process on each node",
    )


def _local_world_size(env: Mapping[str, str], world_size: int) -> int:
    """Return the number of ranks on this node."""
    local_world_size = read_number(env, "LOCAL_WORLD_SIZE")
    if local_world_size is not None:
        return local_world_size
    if world_size == 1 or env.get("MASTER_ADDR") in _LOOPBACK:
        return world_size
    num_nodes = read_first(env, "GROUP_WORLD_SIZE", "NNODES")
    if num_nodes and world_size % num_nodes == 0:
        return world_size // num_nodes
    raise TopologyError(
        f"RANK={env['RANK']}, WORLD_SIZE={world_size} and LOCAL_RANK={env['LOCAL_RANK']} are set, but nothing says how many "
        f"processes share this node. Export LOCAL_WORLD_SIZE, or start the script with torchrun or `hasten launch`."
    )


@dataclass(frozen=True, slots=True)
class _MpiNames:
    """Variable names of one MPI: world rank and size, rank and size on the node."""

    rank: str
    size: str
    local_rank: str
    local_size: str


_MPI: Final = (
    _MpiNames(
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    _MpiNames(
        "MV2_COMM_WORLD_RANK",
        "MV2_COMM_WORLD_SIZE",
        "MV2_COMM_WORLD_LOCAL_RANK",
        "MV2_COMM_WORLD_LOCAL_SIZE",
    ),
    _MpiNames("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    _MpiNames("PMI_RANK", "PMI_SIZE", "PMI_LOCAL_RANK", "PMI_LOCAL_SIZE"),
)


def _parse_mpi(env: Mapping[str, str]) -> Topology | None:
    """Return the topology in the variables of an MPI; None for PMI variables of srun, which SLURM's complete."""
    for mpi_names in _MPI:
        if mpi_names.rank in env and mpi_names.local_rank in env:
            break
    else:
        return None if "SLURM_PROCID" in env else _parse_mpi_without_local_rank(env)
    rank = read_companion(env, mpi_names.local_rank, mpi_names.rank)
    world_size = read_companion(env, mpi_names.rank, mpi_names.size)
    local_world_size = read_companion(env, mpi_names.local_rank, mpi_names.local_size)
    node_rank = read_first(env, "NODE_RANK", "GROUP_RANK")
    if node_rank is None:
        node_rank = rank // max(local_world_size, 1)
    return Topology(
        rank=rank,
        world_size=world_size,
        local_rank=read_companion(env, mpi_names.rank, mpi_names.local_rank),
        local_world_size=local_world_size,
        node_rank=node_rank,
        rendezvous=_rendezvous_url(env, is_alone=local_world_size == world_size),
        source="mpi",
    )


def _parse_mpi_without_local_rank(env: Mapping[str, str]) -> Topology:
    """Return the topology without a rank on the node, which is sufficient only for a single process."""
    mpi_names = next(mpi_names for mpi_names in _MPI if mpi_names.rank in env)
    if read_companion(env, mpi_names.rank, mpi_names.size) == 1:
        return Topology(source="mpi")
    raise TopologyError(
        f"{mpi_names.rank}={env[mpi_names.rank]} and {mpi_names.size}={env[mpi_names.size]} are set, but not {mpi_names.local_rank}: "
        f"without its rank on the node a process would take a device of its neighbour. "
        f"Export {mpi_names.local_rank} and {mpi_names.local_size}, or use torchrun, srun or `hasten launch`."
    )


def _parse_slurm(env: Mapping[str, str]) -> Topology:
    """Return the topology of a task of srun. The batch script also has SLURM_PROCID=0, but no step: one process."""
    if "SLURM_STEP_ID" not in env and "SLURM_STEPID" not in env:
        num_tasks = env.get("SLURM_NTASKS", "1")
        if num_tasks != "1":
            note = f"SLURM_NTASKS={num_tasks}, but srun did not start this process: it is alone"
        else:
            note = ""
        return Topology(source="single", note=note)
    rank = read_companion(env, "SLURM_NTASKS", "SLURM_PROCID")
    world_size = read_companion(
        env, "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"
    )
    local_rank = read_companion(env, "SLURM_PROCID", "SLURM_LOCALID")
    node_rank = read_companion(env, "SLURM_PROCID", "SLURM_NODEID")
    tasks_per_node = _slurm_tasks(env)
    if tasks_per_node and (
        node_rank >= len(tasks_per_node) or sum(tasks_per_node) != world_size
    ):
        raise TopologyError(
            f"SLURM_NODEID={node_rank} and a step of {world_size} tasks contradict SLURM_STEP_TASKS_PER_NODE="
            f"{env['SLURM_STEP_TASKS_PER_NODE']!r}: the variables come from different steps. Start the script with srun itself, "
            f"and do not export SLURM_* by hand."
        )
    if tasks_per_node:
        local_world_size = tasks_per_node[node_rank]
    else:
        local_world_size = world_size // (read_number(env, "SLURM_NNODES") or 1)
    node_list = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST")
    try:
        first_node = first_host(node_list) if node_list else None
    except ValueError as error:
        raise TopologyError(
            f"SLURM_STEP_NODELIST={node_list!r} cannot be read ({error}), so the host of rank 0 is unknown. "
            f"Export MASTER_ADDR and MASTER_PORT, or correct it."
        ) from error
    return Topology(
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        local_world_size=local_world_size,
        node_rank=node_rank,
        rendezvous=_tcp_url(env, first_node, _slurm_port(env)),
        source="slurm",
    )


def _slurm_tasks(env: Mapping[str, str]) -> list[int]:
    tasks_text = env.get("SLURM_STEP_TASKS_PER_NODE")
    if not tasks_text:
        return []
    try:
        return expand_tasks(tasks_text)
    except ValueError as error:
        raise TopologyError(
            f"SLURM_STEP_TASKS_PER_NODE={tasks_text!r} cannot be read ({error}); expected e.g. '4(x2),1'."
        ) from error


def _slurm_port(env: Mapping[str, str]) -> int:
    """Return a port below the ephemeral range that is the same on every rank and differs between jobs and steps."""
    job = read_number(env, "SLURM_JOB_ID") or 0
    step = read_number(env, "SLURM_STEP_ID") or 0
    return 12000 + (job * 31 + step) % 20000


def tpu_workers(env: Mapping[str, str]) -> list[str]:
    """Return the hosts of the slice listed in TPU_WORKER_HOSTNAMES; empty if this host is configured to run alone."""
    if is_single_tpu_process(env):
        return []
    return [host for host in env.get("TPU_WORKER_HOSTNAMES", "").split(",") if host]


def is_single_tpu_process(env: Mapping[str, str]) -> bool:
    """Return whether variables configure libtpu to use this host of a slice alone."""
    process_bounds = next(
        (
            env[name]
            for name in ("TPU_PROCESS_BOUNDS", "TPU_HOST_BOUNDS")
            if env.get(name)
        ),
        "",
    )
    return bool(process_bounds) and all(
        size.strip() == "1" for size in process_bounds.split(",")
    )


def _parse_xla(env: Mapping[str, str]) -> Topology | None:
    """Return the topology under PJRT: TPU_WORKER_ID numbers hosts, PJRT_LOCAL_PROCESS_RANK their processes."""
    if not env.get("PJRT_DEVICE"):
        return None
    local_rank = read_number(env, "PJRT_LOCAL_PROCESS_RANK") or 0
    local_world_size = read_number(env, "PJRT_LOCAL_PROCESS_COUNT") or 1
    node_rank = (
        0 if is_single_tpu_process(env) else read_number(env, "TPU_WORKER_ID") or 0
    )
    num_hosts = max(len(tpu_workers(env)), 1)
    if node_rank >= num_hosts:
        raise contradiction_error(
            env,
            "TPU_WORKER_ID",
            "TPU_WORKER_HOSTNAMES",
            "a worker's number is below the number of hosts",
        )
    return Topology(
        rank=node_rank * local_world_size + local_rank,
        world_size=num_hosts * local_world_size,
        local_rank=local_rank,
        local_world_size=local_world_size,
        node_rank=node_rank,
        rendezvous="xla://",
        source="xla",
    )


def _parse_pod(env: Mapping[str, str]) -> Topology | None:
    """Return the topology of a pod that ran the script directly: PET_* or a Job's index, and the number of pods.

    Without that number, the indices belong to independent tasks.
    """
    size_names = [
        name for name in ("PET_NNODES", "NNODES", "WORLD_SIZE") if name in env
    ]
    num_pods = env[size_names[0]] if size_names else "1"
    per_pod = env.get("PET_NPROC_PER_NODE", "1")
    has_one_process = not per_pod.isdigit() or int(per_pod) <= 1
    if num_pods == "1" and has_one_process:
        return None
    if per_pod != "1" or (size_names[0] == "PET_NNODES" and not num_pods.isdigit()):
        raise TopologyError(
            f"PET_NNODES={num_pods!r} and PET_NPROC_PER_NODE={per_pod!r} ask for more processes than this one, but RANK is not set: "
            f"nothing started them. Run the script under torchrun or `hasten launch`, or unset the PET_* variables."
        )
    rank = read_companion(env, size_names[0], "PET_NODE_RANK", "JOB_COMPLETION_INDEX")
    first_pod = env.get("PET_MASTER_ADDR") or jobset_host(env)
    rendezvous_port = read_number(env, "PET_MASTER_PORT") or DEFAULT_PORT
    return Topology(
        rank=rank,
        world_size=read_number(env, size_names[0]) or 1,
        node_rank=rank,
        rendezvous=_tcp_url(env, first_pod, rendezvous_port),
        source="kubernetes",
        restart_count=read_number(env, "JOBSET_RESTART_ATTEMPT") or 0,
    )


def jobset_host(env: Mapping[str, str]) -> str | None:
    """Return the host name of the first pod of this pod's JobSet, if its labels are in the environment."""
    jobset = env.get("JOBSET_NAME")
    job = env.get("REPLICATED_JOB_NAME")
    return f"{jobset}-{job}-0-0.{jobset}" if jobset and job else None


def _rendezvous_url(env: Mapping[str, str], is_alone: bool) -> str | None:
    """Return the address in MASTER_ADDR; the loopback address if the whole world is on this machine."""
    return _tcp_url(env, "127.0.0.1" if is_alone else None, DEFAULT_PORT)


def _tcp_url(env: Mapping[str, str], host: str | None, port: int) -> str | None:
    """Return tcp://host:port; MASTER_ADDR and MASTER_PORT take precedence over `host` and `port`."""
    host = env.get("MASTER_ADDR") or host
    master_port = read_number(env, "MASTER_PORT")
    if master_port is not None and not 0 < master_port < 65536:
        raise TopologyError(
            f"MASTER_PORT={master_port} is not a port; choose a free one between 1024 and 65535."
        )
    if host is None:
        return None
    return f"tcp://{f'[{host}]' if ':' in host else host}:{master_port or port}"


_SOURCES: Final[
    tuple[tuple[frozenset[str], Callable[[Mapping[str, str]], Topology | None]], ...]
] = (
    # some clusters set WORLD_SIZE alone, on login nodes
    (frozenset({"RANK", "LOCAL_RANK"}), _parse_torch),
    (frozenset(names.rank for names in _MPI), _parse_mpi),
    (frozenset({"SLURM_PROCID"}), _parse_slurm),
    (frozenset({"PJRT_DEVICE"}), _parse_xla),
    (
        frozenset({"PET_NNODES", "PET_NPROC_PER_NODE", "JOB_COMPLETION_INDEX"}),
        _parse_pod,
    ),
)
"""The parsers in order of precedence, each with the variables without which it finds nothing."""
