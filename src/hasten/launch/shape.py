"""Number of machines and processes of a launch, with their devices and threads; decided once for every launcher.

The machines and ranks that a cluster has allocated are read from the variables of SLURM, MPI and Kubernetes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from hasten.config.base import given
from hasten.config.sections.launch import LaunchConfig
from hasten.errors import ConfigError, TopologyError
from hasten.launch.base import Allocation, Host, JobShape, LaunchRequest, Target
from hasten.runtime.env import CONFIG
from hasten.runtime.topology import DEFAULT_PORT, Topology, jobset_host

_LEAST_PROCESS_BYTES: Final = 64 * 1024**2
"""Lower bound for the memory of a process: a Python process that has imported torch uses more."""


def decide(request: LaunchRequest, host: Host) -> JobShape:
    """Return the shape determined by the settings, the cluster and the machine.

    Raises: ConfigError when they contradict each other; TopologyError when the cluster's variables contradict each other.
    """
    config, launch = request.config, request.config.launch
    notes: list[str] = []
    allocation = read_allocation(host.env)
    if allocation.source:
        notes.append(f"{allocation.source} says: {_allocation_words(allocation)}")
    low, high = _machines(launch, allocation)
    rank = _machine_rank(launch, allocation, high)
    use_cpu = config.cpu or host.device == "cpu"
    _check_devices(request, host)
    count, expected, why = _processes(
        request, host, allocation, high, elastic=low != high
    )
    notes.append(why)
    env = {CONFIG: request.handoff} if request.handoff else {}
    if launch.gpu_ids != "all" and not use_cpu:
        env["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, launch.gpu_ids))
    threads, thread_note = _threads(launch, host, count)
    if threads is not None:
        env["OMP_NUM_THREADS"] = str(threads)
    notes += [thread_note] if thread_note else []
    return JobShape(
        num_processes=count,
        min_machines=low,
        max_machines=high,
        machine_rank=rank,
        expected_world_size=expected,
        use_cpu=use_cpu,
        env=tuple(sorted(env.items())),
        notes=tuple(notes),
        allocation=allocation,
    )


def elsewhere(request: LaunchRequest, host: Host, per_machine: int | None) -> JobShape:
    """Return the shape of a job that another launcher starts on its machines; this host's devices are not counted."""
    threads, note = _threads(request.config.launch, host, per_machine or 1)
    env = {CONFIG: request.handoff} if request.handoff else {}
    if threads is not None:
        env["OMP_NUM_THREADS"] = str(threads)
    return JobShape(
        num_processes=per_machine or 1,
        env=tuple(sorted(env.items())),
        notes=(note,) if note else (),
    )


def worker_argv(target: Target, host: Host) -> tuple[str, ...]:
    """Return the command of one process: the program itself, or Python with hasten's bootstrap before it."""
    if target.no_python and target.module:
        raise ConfigError(
            "--module and --no_python contradict each other: a module needs Python. Give one of them."
        )
    if target.no_python:
        return (target.name, *target.args)
    module = ("-m",) if target.module else ()
    return (
        *(host.python, "-m", "hasten.launch.worker"),
        *(*module, target.name, *target.args),
    )


def _machines(launch: LaunchConfig, allocation: Allocation) -> tuple[int, int]:
    """Return the smallest and largest number of machines."""
    if launch.nnodes is not None:
        low, high = split_range(launch.nnodes)
        if "num_machines" in given(launch) and launch.num_machines not in (1, high):
            raise ConfigError(
                f"num_machines={launch.num_machines} contradicts nnodes={launch.nnodes!r}. Give one of them."
            )
        return low, high
    explicit = "num_machines" in given(launch) and launch.num_machines > 1
    if explicit and allocation.num_machines not in (1, launch.num_machines):
        raise ConfigError(
            f"num_machines={launch.num_machines}, but {allocation.source} started this command on "
            f"{allocation.num_machines} machines. Remove num_machines (it is read from the cluster), or make them agree."
        )
    if explicit:
        return launch.num_machines, launch.num_machines
    return allocation.min_machines, allocation.num_machines


def _machine_rank(
    launch: LaunchConfig, allocation: Allocation, machines: int
) -> int | None:
    if machines == 1:
        if launch.machine_rank:
            raise ConfigError(
                f"machine_rank={launch.machine_rank} with one machine: ranks count from 0. Set num_machines to the number of machines, "
                "or remove machine_rank."
            )
        return 0
    rank = (
        launch.machine_rank
        if launch.machine_rank is not None
        else allocation.machine_rank
    )
    if rank is not None and rank >= machines:
        raise ConfigError(
            f"machine_rank={rank} with {machines} machines: ranks count from 0 to {machines - 1}. "
            f"Correct --machine_rank on this machine, or num_machines on all."
        )
    return rank


def _check_devices(request: LaunchRequest, host: Host) -> None:
    launch, config = request.config.launch, request.config
    if config.cpu and launch.multi_gpu:
        raise ConfigError(
            "cpu and multi_gpu contradict each other. Remove one of them."
        )
    if config.cpu and launch.gpu_ids != "all":
        raise ConfigError(
            f"cpu and gpu_ids={_ids(launch)} contradict each other. Remove one of them."
        )
    if launch.multi_gpu and host.device == "cpu":
        raise ConfigError(
            f"multi_gpu was requested, but no usable accelerator was found on {host.name}. "
            f"Check the driver (nvidia-smi) and CUDA_VISIBLE_DEVICES, or pass --cpu."
        )
    if launch.gpu_ids != "all" and host.device == "cpu":
        raise ConfigError(
            f"gpu_ids={_ids(launch)} names devices, but no usable accelerator was found on {host.name}, so none of them can be used. "
            f"Check the driver (nvidia-smi) and CUDA_VISIBLE_DEVICES, or remove gpu_ids."
        )
    if launch.gpu_ids != "all" and "CUDA_VISIBLE_DEVICES" not in host.env:
        absent = [i for i in launch.gpu_ids if not 0 <= i < host.num_devices]
        if absent:
            raise ConfigError(
                f"gpu_ids={_ids(launch)} names {absent}, but {host.name} has {host.num_devices} devices, counted from 0; "
                f"a process on a missing device cannot start. Name devices below {host.num_devices}."
            )


def _processes(
    request: LaunchRequest,
    host: Host,
    allocation: Allocation,
    machines: int,
    *,
    elastic: bool,
) -> tuple[int, int | None, str]:
    """Return the processes on this machine, the total if a number was given, and the reason."""
    launch = request.config.launch
    per, total = launch.processes_per_machine, launch.num_processes
    if per is not None:
        if total is not None and machines == 1 and total != per:
            raise ConfigError(
                f"num_processes={total} contradicts processes_per_machine={per}. Give one of them."
            )
        return (
            _fits(request, host, per),
            total,
            f"{per} on this machine: processes_per_machine",
        )
    if total is not None:
        if elastic:
            raise ConfigError(
                f"num_processes={total} over a changing number of machines (nnodes={launch.nnodes}) has no meaning. "
                f"Give processes_per_machine instead, or neither to use every device."
            )
        if total % machines:
            raise ConfigError(
                f"num_processes={total} cannot be split evenly over {machines} machines. "
                f"Give processes_per_machine on each, or remove both to use every device."
            )
        local_count = total // machines
        split = f"{total} / {machines} machines" if machines > 1 else "num_processes"
        return (
            _fits(request, host, local_count),
            total,
            f"{local_count} on this machine: {split}",
        )
    if allocation.per_machine is not None:
        return (
            allocation.per_machine,
            None,
            f"{allocation.per_machine} on this machine: {allocation.source}",
        )
    if request.config.cpu or host.device == "cpu":
        return 1, None, "1 on this machine: the CPU (give num_processes for more)"
    count = host.num_devices if launch.gpu_ids == "all" else len(launch.gpu_ids)
    return (
        count,
        None,
        f"{count} on this machine: one for each device ({host.device_words})",
    )


def _fits(request: LaunchRequest, host: Host, count: int) -> int:
    """Return `count` if there is a device for each process, or enough memory on the CPU."""
    launch = request.config.launch
    if request.config.cpu or host.device == "cpu":
        check_memory(host, count)
        return count
    devices = host.num_devices if launch.gpu_ids == "all" else len(launch.gpu_ids)
    if count > devices:
        raise ConfigError(
            f"{count} processes were requested on {host.name}, which has {devices} usable devices ({host.device_words}): two processes "
            f"cannot share one. Request at most {devices}, widen gpu_ids, or pass --cpu."
        )
    return count


def check_memory(host: Host, count: int) -> None:
    """Raise unless the memory of this machine can hold `count` processes. Raises: ConfigError."""
    max_processes = max(host.cores, host.memory_bytes // _LEAST_PROCESS_BYTES)
    if host.memory_bytes and count > max_processes:
        raise ConfigError(
            f"{count} processes were requested on {host.name}, whose memory of {host.memory_bytes / 1024**3:.3g} GiB is too small: each "
            f"needs at least {_LEAST_PROCESS_BYTES // 1024**2} MiB. Request at most {max_processes}, or for more machines."
        )


def _threads(launch: LaunchConfig, host: Host, count: int) -> tuple[int | None, str]:
    """Return OMP_NUM_THREADS and a note: as set, else cores per process; None (torch's default) for one process."""
    if launch.num_cpu_threads_per_process is not None:
        return launch.num_cpu_threads_per_process, ""
    if "OMP_NUM_THREADS" in host.env:
        return None, ""
    if count == 1:
        return None, ""
    threads = max(1, host.cores // count)
    return threads, f"OMP_NUM_THREADS={threads}: {host.cores} cores / {count} processes"


def _ids(launch: LaunchConfig) -> str:
    return (
        launch.gpu_ids
        if isinstance(launch.gpu_ids, str)
        else ",".join(map(str, launch.gpu_ids))
    )


def _allocation_words(allocation: Allocation) -> str:
    if allocation.rank is not None:
        return f"this is rank {allocation.rank.rank} of {allocation.rank.world_size}"
    low, high = allocation.min_machines, allocation.num_machines
    machines = f"{high} machines" if low == high else f"{low} to {high} machines"
    return f"{machines}, this is {'one of them' if allocation.machine_rank is None else allocation.machine_rank}"


def read_allocation(env: Mapping[str, str]) -> Allocation:
    """Return the allocation described by `env`; one machine if nothing describes more.

    Raises: TopologyError if the variables contradict each other.
    """
    return _elastic_pods(env) or _pods(env) or _tasks(env) or Allocation()


def _elastic_pods(env: Mapping[str, str]) -> Allocation | None:
    """Return the allocation in torchrun's variables (PET_*), as the Kubernetes training operator sets them."""
    if "PET_NNODES" not in env:
        return None
    low, high = split_range(env["PET_NNODES"], "PET_NNODES")
    rank = env.get("PET_NODE_RANK") or env.get("JOB_COMPLETION_INDEX", "")
    per = env.get("PET_NPROC_PER_NODE", "")
    endpoint = env.get("PET_RDZV_ENDPOINT", "")
    address = (
        env.get("PET_MASTER_ADDR")
        or env.get("MASTER_ADDR")
        or endpoint.rpartition(":")[0]
        or None
    )
    port = (
        env.get("PET_MASTER_PORT")
        or env.get("MASTER_PORT")
        or endpoint.rpartition(":")[2]
    )
    if high == 1 and not per.isdecimal():
        return None
    return Allocation(
        source="Kubernetes (PET_*)",
        num_machines=high,
        min_machines=low,
        machine_rank=int(rank) if rank.isdecimal() else None,
        address=address,
        port=int(port) if port.isdecimal() else DEFAULT_PORT,
        per_machine=int(per) if per.isdecimal() else None,
    )


def _pods(env: Mapping[str, str]) -> Allocation | None:
    """Return the allocation of one command per pod: RANK of WORLD_SIZE (or NODE_RANK of NNODES), without LOCAL_RANK."""
    address = env.get("MASTER_ADDR") or jobset_host(env)
    if "LOCAL_RANK" in env or not address:
        return None
    for rank_name, size_name in (
        ("NODE_RANK", "NNODES"),
        ("RANK", "WORLD_SIZE"),
        ("JOB_COMPLETION_INDEX", "NNODES"),
    ):
        rank, size = env.get(rank_name, ""), env.get(size_name, "")
        if rank.isdecimal() and size.isdecimal() and int(size) > 1:
            if int(rank) >= int(size):
                raise TopologyError(
                    f"{rank_name}={rank} with {size_name}={size} is impossible: machines count from 0 to {size_name}-1. "
                    f"Make the variables agree, or unset those of another launcher."
                )
            port = env.get("MASTER_PORT", "")
            return Allocation(
                source=f"{rank_name} and {size_name}",
                num_machines=int(size),
                min_machines=int(size),
                machine_rank=int(rank),
                address=address,
                port=int(port) if port.isdecimal() else DEFAULT_PORT,
            )
    return None


def _tasks(env: Mapping[str, str]) -> Allocation | None:
    """Return the allocation of a command started by srun or mpirun: one per machine, or one per rank."""
    if "LOCAL_RANK" in env:
        return None
    topology = Topology.from_env(env)
    if topology.source not in ("slurm", "mpi") or topology.world_size == 1:
        return None
    if topology.local_world_size > 1:
        return Allocation(source=topology.source, rank=topology)
    address, port = _split_address(topology.rendezvous)
    return Allocation(
        source=topology.source,
        num_machines=topology.world_size,
        min_machines=topology.world_size,
        machine_rank=topology.rank,
        address=address,
        port=port,
    )


def split_range(text: str, name: str = "--nnodes") -> tuple[int, int]:
    """Return the smallest and largest number of machines in `4` or `2:4`.

    Raises: ConfigError for anything else.
    """
    low, _, high = text.strip().partition(":")
    high = high or low
    if low.isdecimal() and high.isdecimal() and 1 <= int(low) <= int(high):
        return int(low), int(high)
    raise ConfigError(
        f"{name}={text!r} is not a number of machines; write one number, or min:max such as 2:4."
    )


def _split_address(rendezvous: str | None) -> tuple[str | None, int | None]:
    """Return the host and the port in tcp://host:port."""
    if not rendezvous:
        return None, None
    host, _, port = rendezvous.removeprefix("tcp://").rpartition(":")
    return host.strip("[]"), int(port)
