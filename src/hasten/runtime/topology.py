"""Rank, world size and node of this process, parsed from the launcher's environment variables. Does not import torch.

Sources in order of precedence: RANK and WORLD_SIZE (torchrun, the Kubernetes torch operator, anything that
sets torch's variables), MPI (Open MPI, MVAPICH, MPICH and Intel MPI, Cray PALS), LSF's jsrun, SLURM's srun, bare PMI,
XLA, PET_* and JOB_COMPLETION_INDEX (a Kubernetes pod in which torchrun was not called). MPI precedes SLURM because mpirun inside a SLURM job
starts its daemons with srun, whose variables then describe the daemons, not the workers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Final, Literal, Self, assert_never

from hasten.errors import TopologyError
from hasten.runtime.nodelist import expand_hosts, expand_tasks


def number(env: Mapping[str, str], name: str) -> int | None:
    """Return the whole number in variable `name`; None if it is not set."""
    value = env.get(name)
    if value is None:
        return None
    if not value.strip().isdecimal():
        raise TopologyError(
            f"{name}={value!r} is not a whole number, so this process does not know its place in the job. "
            f"Correct {name}, or unset it if it is left over from another launcher."
        )
    return int(value)


def first(env: Mapping[str, str], *names: str) -> int | None:
    """Return the number in the first variable of `names` that is set."""
    return next(
        (found for name in names if (found := number(env, name)) is not None), None
    )


def companion(env: Mapping[str, str], name: str, beside: str) -> int:
    """Return the number in variable `name`, which is required because `beside` is set."""
    value = number(env, name)
    if value is None:
        raise missing(env, name, beside)
    return value


def missing(env: Mapping[str, str], name: str, beside: str) -> TopologyError:
    """Return the error for a missing variable `name` that is required because `beside` is set."""
    return TopologyError(
        f"{beside}={env.get(beside)} is set but {name} is not, so the place of this process in the job is unclear. "
        f"Export {name} as well, or unset {beside} to run alone."
    )


def contradiction(
    env: Mapping[str, str], name: str, other: str, why: str
) -> TopologyError:
    """Return the error for two variables that contradict each other."""
    return TopologyError(
        f"{name}={env.get(name)} contradicts {other}={env.get(other)}: {why}. "
        f"Make them agree, or unset those that another launcher left behind."
    )


Source = Literal["single", "torch", "kubernetes", "slurm", "mpi", "lsf", "xla"]

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
        _check_range("rank", self.rank, "world_size", self.world_size, self.source)
        _check_range(
            "local_rank",
            self.local_rank,
            "local_world_size",
            self.local_world_size,
            self.source,
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
    def from_env(cls, env: Mapping[str, str]) -> Self:
        """Return the topology described by `env`; a single process if nothing describes one.

        Raises: TopologyError with the variable and its value if it is not a number, its companion is missing,
        or it contradicts another variable.
        """
        for variables, parse in _SOURCES:
            if not variables.isdisjoint(env) and (found := parse(env)) is not None:
                return cls(**{name: getattr(found, name) for name in cls.__slots__})
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


def _torch(env: Mapping[str, str]) -> Topology | None:
    """Return the topology in RANK and WORLD_SIZE, with or without LOCAL_RANK; None where LOCAL_RANK=-1 stands alone."""
    # scripts for several processes say so that there is one
    if env.get("LOCAL_RANK") == "-1" and "RANK" not in env:
        return None
    rank, world_size = (
        companion(env, "RANK", "LOCAL_RANK"),
        companion(env, "WORLD_SIZE", "RANK"),
    )
    node_rank = first(env, "GROUP_RANK", "NODE_RANK", "PET_NODE_RANK")
    if "LOCAL_RANK" not in env:
        return _torch_without_local_rank(env, rank, world_size)
    local_world_size = _local_world_size(env, world_size)
    groups = number(env, "GROUP_WORLD_SIZE")
    if node_rank is not None and groups is not None and node_rank >= groups:
        raise contradiction(
            env,
            "GROUP_RANK",
            "GROUP_WORLD_SIZE",
            "a node's number is below the number of nodes",
        )
    return Topology(
        rank=rank,
        world_size=world_size,
        local_rank=companion(env, "LOCAL_RANK", "RANK"),
        local_world_size=local_world_size,
        node_rank=rank // local_world_size if node_rank is None else node_rank,
        rendezvous=_rendezvous(env, alone=local_world_size == world_size),
        source="torch",
        restart_count=number(env, "TORCHELASTIC_RESTART_COUNT") or 0,
    )


def _torch_without_local_rank(
    env: Mapping[str, str], rank: int, world_size: int
) -> Topology:
    """Return the topology of one process per pod, or of several started manually on one machine."""
    per_node = env.get("PET_NPROC_PER_NODE", "1")
    if per_node != "1":
        raise TopologyError(
            f"RANK={rank} numbers this pod, and PET_NPROC_PER_NODE={per_node!r} asks for several processes in it, but LOCAL_RANK "
            f"is not set: the pod's command did not start them. Run the script under torchrun or `hasten launch`."
        )
    here = env.get("MASTER_ADDR") in _LOOPBACK and "KUBERNETES_SERVICE_HOST" not in env
    note = "RANK is set without LOCAL_RANK: "
    return Topology(
        rank=rank,
        world_size=world_size,
        local_rank=rank if here else 0,
        local_world_size=world_size if here else 1,
        node_rank=0 if here else rank,
        rendezvous=_rendezvous(env, alone=world_size == 1),
        source="torch" if here else "kubernetes",
        note=note
        + (
            "MASTER_ADDR is this machine, so every rank is on it"
            if here
            else "one process on each node"
        ),
    )


def _local_world_size(env: Mapping[str, str], world_size: int) -> int:
    """Return the number of ranks on this node, from the first variable that provides it."""
    given = first(env, "LOCAL_WORLD_SIZE", "LOCAL_SIZE")
    if given is not None:
        return given
    if world_size == 1 or env.get("MASTER_ADDR") in _LOOPBACK:
        return world_size
    nodes = first(env, "GROUP_WORLD_SIZE", "NNODES", "PET_NNODES")
    if nodes and world_size % nodes == 0:
        return world_size // nodes
    tasks, node = _slurm_tasks(env), number(env, "SLURM_NODEID")
    if sum(tasks) == world_size and node is not None and node < len(tasks):
        return tasks[node]
    raise TopologyError(
        f"RANK={env['RANK']}, WORLD_SIZE={world_size} and LOCAL_RANK={env['LOCAL_RANK']} are set, but nothing says how many "
        f"processes share this node. Export LOCAL_WORLD_SIZE, or start the script with torchrun or `hasten launch`."
    )


@dataclass(frozen=True, slots=True)
class _Names:
    """Variable names of one MPI: world rank and size, rank and size on the node."""

    rank: str
    size: str
    local_rank: str
    local_size: str


_MPI: Final = (
    _Names(
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    _Names(
        "MV2_COMM_WORLD_RANK",
        "MV2_COMM_WORLD_SIZE",
        "MV2_COMM_WORLD_LOCAL_RANK",
        "MV2_COMM_WORLD_LOCAL_SIZE",
    ),
    _Names("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    _Names("PMI_RANK", "PMI_SIZE", "PMI_LOCAL_RANK", "PMI_LOCAL_SIZE"),
)
_OPEN_MPI_JOB: Final = "OMPI_MCA_ess_base_jobid"
_JSM: Final = _Names(
    "JSM_NAMESPACE_RANK",
    "JSM_NAMESPACE_SIZE",
    "JSM_NAMESPACE_LOCAL_RANK",
    "JSM_NAMESPACE_LOCAL_SIZE",
)


def _mpi(env: Mapping[str, str]) -> Topology | None:
    if _JSM.rank in env:
        # jsrun sets Open MPI's variables too, but only the JSM variables include the hosts
        return None
    names = next((n for n in _MPI if n.rank in env and n.local_rank in env), None)
    return _from_names(env, names, "mpi") if names else None


def _lsf(env: Mapping[str, str]) -> Topology:
    found = _from_names(env, _JSM, "lsf")
    hosts = (
        env.get("LSB_MCPU_HOSTS", "").split()[::2] or env.get("LSB_HOSTS", "").split()
    )
    # The first host of an LSF job runs the batch script; if it is a launch node it holds no ranks (one slot only).
    slots = env.get("LSB_MCPU_HOSTS", "").split()[1::2]
    host = next(
        (h for h, n in zip(hosts, slots, strict=False) if n != "1"),
        hosts[0] if hosts else None,
    )
    port = _job_port(env, "LSB_JOBID", None)
    return replace(found, rendezvous=found.rendezvous or _address(env, host, port))


def _pmi(env: Mapping[str, str]) -> Topology:
    """Return the topology in PMI variables without a local rank, which is sufficient only for a single process."""
    if companion(env, "PMI_SIZE", "PMI_RANK") == 1:
        return Topology(source="mpi")
    raise TopologyError(
        f"PMI_RANK={env['PMI_RANK']} and PMI_SIZE={env['PMI_SIZE']} are set, but neither MPI_LOCALRANKID nor PMI_LOCAL_RANK: "
        f"without its rank on the node a process would take a device of its neighbour. "
        f"Export MPI_LOCALRANKID and MPI_LOCALNRANKS, or use torchrun, srun or `hasten launch`."
    )


def _from_names(env: Mapping[str, str], names: _Names, source: Source) -> Topology:
    rank, world_size = (
        companion(env, names.rank, names.size),
        companion(env, names.size, names.rank),
    )
    local_rank, local_world_size = (
        number(env, names.local_rank),
        number(env, names.local_size),
    )
    if local_rank is None or local_world_size is None:
        raise TopologyError(
            f"{names.rank}={rank} is set without {names.local_rank} and {names.local_size}, so the place of this process on "
            f"its node is unknown. Export both, or use torchrun, srun or `hasten launch`."
        )
    node_rank = first(env, "NODE_RANK", "GROUP_RANK")
    # Open MPI numbers its jobs, so that two jobs on one machine use different ports.
    port = _job_port(env, _OPEN_MPI_JOB, None) if _OPEN_MPI_JOB in env else DEFAULT_PORT
    return Topology(
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        local_world_size=local_world_size,
        node_rank=rank // max(local_world_size, 1) if node_rank is None else node_rank,
        rendezvous=_address(
            env, "127.0.0.1" if local_world_size == world_size else None, port
        ),
        source=source,
    )


def _slurm(env: Mapping[str, str]) -> Topology:
    """Return the topology of a task of srun. The batch script also has SLURM_PROCID=0, but no step: one process."""
    if "SLURM_STEP_ID" not in env and "SLURM_STEPID" not in env:
        asked = env.get("SLURM_NTASKS", "1")
        note = (
            f"SLURM_NTASKS={asked}, but srun did not start this process: it is alone"
            if asked != "1"
            else ""
        )
        return Topology(source="single", note=note)
    rank, world_size = companion(env, "SLURM_PROCID", "SLURM_NTASKS"), _slurm_size(env)
    local_rank, node_rank = (
        companion(env, name, "SLURM_PROCID")
        for name in ("SLURM_LOCALID", "SLURM_NODEID")
    )
    tasks = _slurm_tasks(env)
    if tasks and (node_rank >= len(tasks) or sum(tasks) != world_size):
        raise TopologyError(
            f"SLURM_NODEID={node_rank} and a step of {world_size} tasks contradict SLURM_STEP_TASKS_PER_NODE="
            f"{env['SLURM_STEP_TASKS_PER_NODE']!r}: the variables come from different steps. Start the script with srun itself, "
            f"and do not export SLURM_* by hand."
        )
    local_world_size = (
        tasks[node_rank] if tasks else world_size // (number(env, "SLURM_NNODES") or 1)
    )
    list_name = next(
        (
            n
            for n in ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
            if env.get(n)
        ),
        None,
    )
    host = _expanded_hosts(env, list_name)[0] if list_name else None
    return Topology(
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        local_world_size=local_world_size,
        node_rank=node_rank,
        rendezvous=_address(env, host, _job_port(env, "SLURM_JOB_ID", "SLURM_STEP_ID")),
        source="slurm",
    )


def _slurm_size(env: Mapping[str, str]) -> int:
    size = first(env, "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS")
    if size is None:
        raise missing(env, "SLURM_NTASKS", "SLURM_PROCID")
    return size


def _slurm_tasks(env: Mapping[str, str]) -> list[int]:
    text = env.get("SLURM_STEP_TASKS_PER_NODE")
    if not text:
        return []
    try:
        return expand_tasks(text)
    except ValueError as error:
        raise TopologyError(
            f"SLURM_STEP_TASKS_PER_NODE={text!r} cannot be read ({error}); expected e.g. '4(x2),1'."
        ) from error


def _expanded_hosts(env: Mapping[str, str], name: str) -> list[str]:
    try:
        return expand_hosts(env[name])
    except ValueError as error:
        raise TopologyError(
            f"{name}={env[name]!r} cannot be read as a node list ({error}), so the host of rank 0 is unknown. "
            f"Export MASTER_ADDR and MASTER_PORT, or correct {name}."
        ) from error


def tpu_workers(env: Mapping[str, str]) -> list[str]:
    """Return the hosts of the slice listed in TPU_WORKER_HOSTNAMES; empty if this host is configured to run alone."""
    return (
        []
        if tpu_runs_alone(env)
        else [host for host in env.get("TPU_WORKER_HOSTNAMES", "").split(",") if host]
    )


def tpu_runs_alone(env: Mapping[str, str]) -> bool:
    """Return whether variables configure libtpu to use this host of a slice alone."""
    bounds = next(
        (
            env[name]
            for name in ("TPU_PROCESS_BOUNDS", "TPU_HOST_BOUNDS")
            if env.get(name)
        ),
        "",
    )
    return bool(bounds) and all(size.strip() == "1" for size in bounds.split(","))


def _xla(env: Mapping[str, str]) -> Topology | None:
    """Return the topology under PJRT: TPU_WORKER_ID numbers hosts, PJRT_LOCAL_PROCESS_RANK their processes."""
    if not env.get("PJRT_DEVICE"):
        return None
    local_rank = number(env, "PJRT_LOCAL_PROCESS_RANK") or 0
    local_world_size = number(env, "PJRT_LOCAL_PROCESS_COUNT") or 1
    node_rank = 0 if tpu_runs_alone(env) else number(env, "TPU_WORKER_ID") or 0
    num_hosts = max(len(tpu_workers(env)), 1)
    if node_rank >= num_hosts:
        raise contradiction(
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


def _pod(env: Mapping[str, str]) -> Topology | None:
    """Return the topology of a pod whose PET_* variables are meant for torchrun, but which ran the script directly."""
    nodes, per_node = env.get("PET_NNODES", "1"), env.get("PET_NPROC_PER_NODE", "1")
    if nodes == "1" and not (per_node.isdigit() and int(per_node) > 1):
        return None
    if nodes.isdigit() and per_node == "1":
        index = first(env, "PET_NODE_RANK", "JOB_COMPLETION_INDEX")
        rank = companion(env, "PET_NODE_RANK", "PET_NNODES") if index is None else index
        host = env.get("PET_MASTER_ADDR") or jobset_host(env)
        return _one_of_pods(
            env, rank, int(nodes), host, number(env, "PET_MASTER_PORT") or DEFAULT_PORT
        )
    raise TopologyError(
        f"PET_NNODES={nodes!r} and PET_NPROC_PER_NODE={per_node!r} ask for more processes than this one, but RANK is not set: "
        f"nothing started them. Run the script under torchrun or `hasten launch`, or unset the PET_* variables."
    )


def _indexed_pod(env: Mapping[str, str]) -> Topology | None:
    """Return the topology of a pod of an indexed Job, as JobSet creates them: NNODES (or WORLD_SIZE) counts the pods.

    Without that number, the indices belong to independent tasks.
    """
    nodes = first(env, "NNODES", "WORLD_SIZE")
    if nodes is None or nodes < 2:
        return None
    return _one_of_pods(
        env,
        companion(env, "JOB_COMPLETION_INDEX", "NNODES"),
        nodes,
        jobset_host(env),
        DEFAULT_PORT,
    )


def _one_of_pods(
    env: Mapping[str, str], rank: int, num_pods: int, host: str | None, port: int
) -> Topology:
    return Topology(
        rank=rank,
        world_size=num_pods,
        node_rank=rank,
        rendezvous=_address(env, host, port),
        source="kubernetes",
        restart_count=number(env, "JOBSET_RESTART_ATTEMPT") or 0,
    )


def jobset_host(env: Mapping[str, str]) -> str | None:
    """Return the host name of the first pod of this pod's JobSet, if its labels are in the environment."""
    jobset, job = env.get("JOBSET_NAME"), env.get("REPLICATED_JOB_NAME")
    return f"{jobset}-{job}-0-0.{jobset}" if jobset and job else None


def _rendezvous(env: Mapping[str, str], alone: bool) -> str | None:
    """Return the address in MASTER_ADDR; the loopback address if the whole world is on this machine."""
    return _address(env, "127.0.0.1" if alone else None, DEFAULT_PORT)


def _address(env: Mapping[str, str], host: str | None, port: int) -> str | None:
    """Return tcp://host:port; MASTER_ADDR and MASTER_PORT take precedence over `host` and `port`."""
    host = env.get("MASTER_ADDR") or host
    given = number(env, "MASTER_PORT")
    if given is not None and not 0 < given < 65536:
        raise TopologyError(
            f"MASTER_PORT={given} is not a port; choose a free one between 1024 and 65535."
        )
    if host is None:
        return None
    return f"tcp://{f'[{host}]' if ':' in host else host}:{given or port}"


def _job_port(env: Mapping[str, str], job: str, step: str | None) -> int:
    """Return a port below the ephemeral range that is the same on every rank and differs between jobs and steps."""
    key = (number(env, job) or 0) * 31 + ((number(env, step) or 0) if step else 0)
    return 12000 + key % 20000


def _check_range(
    name: str, value: int, size_name: str, size: int, source: Source
) -> None:
    if size < 1 or not 0 <= value < size:
        variables = _variables(source, local=name.startswith("local"))
        raise TopologyError(
            f"{name}={value} with {size_name}={size} is impossible (read from {variables}): ranks count from 0 to {size_name}-1. "
            f"Make the variables agree, or unset those that another launcher left behind."
        )


def _variables(source: Source, local: bool) -> str:
    """Return the names of the variables to show in an error."""
    match source:
        case "torch":
            return "LOCAL_RANK and LOCAL_WORLD_SIZE" if local else "RANK and WORLD_SIZE"
        case "kubernetes":
            return "RANK and WORLD_SIZE, PET_NODE_RANK and PET_NNODES, or JOB_COMPLETION_INDEX and NNODES"
        case "slurm":
            return (
                "SLURM_LOCALID and SLURM_STEP_TASKS_PER_NODE"
                if local
                else "SLURM_PROCID and SLURM_NTASKS"
            )
        case "mpi":
            return "OMPI_COMM_WORLD_*, MV2_COMM_WORLD_*, PMI_* and MPI_LOCAL*"
        case "lsf":
            return "JSM_NAMESPACE_*"
        case "xla":
            return "PJRT_LOCAL_PROCESS_RANK, PJRT_LOCAL_PROCESS_COUNT, TPU_WORKER_ID and TPU_WORKER_HOSTNAMES"
        case "single":
            return "the arguments"
        case other:
            assert_never(other)


_SOURCES: Final[
    tuple[tuple[frozenset[str], Callable[[Mapping[str, str]], Topology | None]], ...]
] = (
    # some clusters set WORLD_SIZE alone, on login nodes
    (frozenset({"RANK", "LOCAL_RANK"}), _torch),
    (frozenset(names.rank for names in _MPI), _mpi),
    (frozenset({_JSM.rank}), _lsf),
    (frozenset({"SLURM_PROCID"}), _slurm),
    (frozenset({"PMI_RANK"}), _pmi),
    (frozenset({"PJRT_DEVICE"}), _xla),
    (frozenset({"PET_NNODES", "PET_NPROC_PER_NODE"}), _pod),
    (frozenset({"JOB_COMPLETION_INDEX"}), _indexed_pod),
)
"""The parsers in order of precedence, each with the variables without which it finds nothing."""
