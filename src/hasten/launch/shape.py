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

_MIN_PROCESS_BYTES: Final = 64 * 1024**2
"""Lower bound for the memory of a process: a Python process that has imported torch uses more."""


def decide_shape(request: LaunchRequest, host: Host) -> JobShape:
    """Return the shape determined by the settings, the cluster and the machine.

    Raises: ConfigError when they contradict each other; TopologyError when the cluster's variables contradict each other.
    """
    config = request.config
    launch_settings = request.config.launch
    notes: list[str] = []
    allocation = read_allocation(host.env)
    if allocation.source:
        notes.append(f"{allocation.source} says: {_allocation_words(allocation)}")
    min_machines, max_machines = _machine_range(launch_settings, allocation)
    machine_rank = _machine_rank(launch_settings, allocation, max_machines)
    use_cpu = config.cpu or host.device == "cpu"
    _check_devices(request, host)
    num_processes, expected_world_size, reason = _local_processes(
        request, host, allocation, max_machines, elastic=min_machines != max_machines
    )
    notes.append(reason)
    if request.handoff:
        worker_variables = {CONFIG: request.handoff}
    else:
        worker_variables = {}
    if launch_settings.gpu_ids != "all" and not use_cpu:
        worker_variables["CUDA_VISIBLE_DEVICES"] = ",".join(
            map(str, launch_settings.gpu_ids)
        )
    num_threads, thread_note = _thread_count(launch_settings, host, num_processes)
    if num_threads is not None:
        worker_variables["OMP_NUM_THREADS"] = str(num_threads)
    if thread_note:
        notes.append(thread_note)
    return JobShape(
        num_processes=num_processes,
        min_machines=min_machines,
        max_machines=max_machines,
        machine_rank=machine_rank,
        expected_world_size=expected_world_size,
        use_cpu=use_cpu,
        env=tuple(sorted(worker_variables.items())),
        notes=tuple(notes),
        allocation=allocation,
    )


def remote_shape(
    request: LaunchRequest, host: Host, per_machine: int | None
) -> JobShape:
    """Return the shape of a job that another launcher starts on its machines; this host's devices are not counted."""
    num_threads, thread_note = _thread_count(
        request.config.launch, host, per_machine or 1
    )
    if request.handoff:
        worker_variables = {CONFIG: request.handoff}
    else:
        worker_variables = {}
    if num_threads is not None:
        worker_variables["OMP_NUM_THREADS"] = str(num_threads)
    return JobShape(
        num_processes=per_machine or 1,
        env=tuple(sorted(worker_variables.items())),
        notes=(thread_note,) if thread_note else (),
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


def _machine_range(
    launch_settings: LaunchConfig, allocation: Allocation
) -> tuple[int, int]:
    """Return the smallest and largest number of machines."""
    if launch_settings.nnodes is not None:
        min_machines, max_machines = split_range(launch_settings.nnodes)
        if "num_machines" in given(
            launch_settings
        ) and launch_settings.num_machines not in (1, max_machines):
            raise ConfigError(
                f"num_machines={launch_settings.num_machines} contradicts nnodes={launch_settings.nnodes!r}. Give one of them."
            )
        return min_machines, max_machines
    is_explicit = (
        "num_machines" in given(launch_settings) and launch_settings.num_machines > 1
    )
    if is_explicit and allocation.num_machines not in (1, launch_settings.num_machines):
        raise ConfigError(
            f"num_machines={launch_settings.num_machines}, but {allocation.source} started this command on "
            f"{allocation.num_machines} machines. Remove num_machines (it is read from the cluster), or make them agree."
        )
    if is_explicit:
        return launch_settings.num_machines, launch_settings.num_machines
    return allocation.min_machines, allocation.num_machines


def _machine_rank(
    launch_settings: LaunchConfig, allocation: Allocation, num_machines: int
) -> int | None:
    if num_machines == 1:
        if launch_settings.machine_rank:
            raise ConfigError(
                f"machine_rank={launch_settings.machine_rank} with one machine: ranks count from 0. Set num_machines to the number of machines, "
                "or remove machine_rank."
            )
        return 0
    rank = allocation.machine_rank
    if launch_settings.machine_rank is not None:
        rank = launch_settings.machine_rank
    if rank is not None and rank >= num_machines:
        raise ConfigError(
            f"machine_rank={rank} with {num_machines} machines: ranks count from 0 to {num_machines - 1}. "
            f"Correct --machine_rank on this machine, or num_machines on all."
        )
    return rank


def _check_devices(request: LaunchRequest, host: Host) -> None:
    launch_settings = request.config.launch
    config = request.config
    if config.cpu and launch_settings.multi_gpu:
        raise ConfigError(
            "cpu and multi_gpu contradict each other. Remove one of them."
        )
    if config.cpu and launch_settings.gpu_ids != "all":
        raise ConfigError(
            f"cpu and gpu_ids={_gpu_ids_text(launch_settings)} contradict each other. Remove one of them."
        )
    if launch_settings.multi_gpu and host.device == "cpu":
        raise ConfigError(
            f"multi_gpu was requested, but no usable accelerator was found on {host.name}. "
            f"Check the driver (nvidia-smi) and CUDA_VISIBLE_DEVICES, or pass --cpu."
        )
    if launch_settings.gpu_ids != "all" and host.device == "cpu":
        raise ConfigError(
            f"gpu_ids={_gpu_ids_text(launch_settings)} names devices, but no usable accelerator was found on {host.name}, so none of them can be used. "
            f"Check the driver (nvidia-smi) and CUDA_VISIBLE_DEVICES, or remove gpu_ids."
        )
    if launch_settings.gpu_ids != "all" and "CUDA_VISIBLE_DEVICES" not in host.env:
        absent_ids = []
        for device_id in launch_settings.gpu_ids:
            if not 0 <= device_id < host.num_devices:
                absent_ids.append(device_id)
        if absent_ids:
            raise ConfigError(
                f"gpu_ids={_gpu_ids_text(launch_settings)} names {absent_ids}, but {host.name} has {host.num_devices} devices, counted from 0; "
                f"a process on a missing device cannot start. Name devices below {host.num_devices}."
            )


def _local_processes(
    request: LaunchRequest,
    host: Host,
    allocation: Allocation,
    num_machines: int,
    *,
    elastic: bool,
) -> tuple[int, int | None, str]:
    """Return the processes on this machine, the total if a number was given, and the reason."""
    launch_settings = request.config.launch
    per_machine = launch_settings.processes_per_machine
    num_processes = launch_settings.num_processes
    if per_machine is not None:
        if (
            num_processes is not None
            and num_machines == 1
            and num_processes != per_machine
        ):
            raise ConfigError(
                f"num_processes={num_processes} contradicts processes_per_machine={per_machine}. Give one of them."
            )
        return (
            _check_count(request, host, per_machine),
            num_processes,
            f"{per_machine} on this machine: processes_per_machine",
        )
    if num_processes is not None:
        if elastic:
            raise ConfigError(
                f"num_processes={num_processes} over a changing number of machines (nnodes={launch_settings.nnodes}) has no meaning. "
                f"Give processes_per_machine instead, or neither to use every device."
            )
        if num_processes % num_machines:
            raise ConfigError(
                f"num_processes={num_processes} cannot be split evenly over {num_machines} machines. "
                f"Give processes_per_machine on each, or remove both to use every device."
            )
        local_count = num_processes // num_machines
        if num_machines > 1:
            split_text = f"{num_processes} / {num_machines} machines"
        else:
            split_text = "num_processes"
        return (
            _check_count(request, host, local_count),
            num_processes,
            f"{local_count} on this machine: {split_text}",
        )
    if allocation.per_machine is not None:
        return (
            allocation.per_machine,
            None,
            f"{allocation.per_machine} on this machine: {allocation.source}",
        )
    if request.config.cpu or host.device == "cpu":
        return 1, None, "1 on this machine: the CPU (give num_processes for more)"
    if launch_settings.gpu_ids == "all":
        num_devices = host.num_devices
    else:
        num_devices = len(launch_settings.gpu_ids)
    return (
        num_devices,
        None,
        f"{num_devices} on this machine: one for each device ({host.device_words})",
    )


def _check_count(request: LaunchRequest, host: Host, num_processes: int) -> int:
    """Return `count` if there is a device for each process, or enough memory on the CPU."""
    launch_settings = request.config.launch
    if request.config.cpu or host.device == "cpu":
        check_memory(host, num_processes)
        return num_processes
    if launch_settings.gpu_ids == "all":
        num_devices = host.num_devices
    else:
        num_devices = len(launch_settings.gpu_ids)
    if num_processes > num_devices:
        raise ConfigError(
            f"{num_processes} processes were requested on {host.name}, which has {num_devices} usable devices ({host.device_words}): two processes "
            f"cannot share one. Request at most {num_devices}, widen gpu_ids, or pass --cpu."
        )
    return num_processes


def check_memory(host: Host, num_processes: int) -> None:
    """Raise unless the memory of this machine can hold `count` processes. Raises: ConfigError."""
    max_processes = max(host.cores, host.memory_bytes // _MIN_PROCESS_BYTES)
    if host.memory_bytes and num_processes > max_processes:
        raise ConfigError(
            f"{num_processes} processes were requested on {host.name}, whose memory of {host.memory_bytes / 1024**3:.3g} GiB is too small: each "
            f"needs at least {_MIN_PROCESS_BYTES // 1024**2} MiB. Request at most {max_processes}, or for more machines."
        )


def _thread_count(
    launch_settings: LaunchConfig, host: Host, num_processes: int
) -> tuple[int | None, str]:
    """Return OMP_NUM_THREADS and a note: as set, else cores per process; None (torch's default) for one process."""
    if launch_settings.num_cpu_threads_per_process is not None:
        return launch_settings.num_cpu_threads_per_process, ""
    if "OMP_NUM_THREADS" in host.env:
        return None, ""
    if num_processes == 1:
        return None, ""
    num_threads = max(1, host.cores // num_processes)
    return (
        num_threads,
        f"OMP_NUM_THREADS={num_threads}: {host.cores} cores / {num_processes} processes",
    )


def _gpu_ids_text(launch_settings: LaunchConfig) -> str:
    if isinstance(launch_settings.gpu_ids, str):
        return launch_settings.gpu_ids
    return ",".join(map(str, launch_settings.gpu_ids))


def _allocation_words(allocation: Allocation) -> str:
    if allocation.rank is not None:
        return f"this is rank {allocation.rank.rank} of {allocation.rank.world_size}"
    min_machines = allocation.min_machines
    max_machines = allocation.num_machines
    if min_machines == max_machines:
        machines_text = f"{max_machines} machines"
    else:
        machines_text = f"{min_machines} to {max_machines} machines"
    return f"{machines_text}, this is {'one of them' if allocation.machine_rank is None else allocation.machine_rank}"


def read_allocation(env: Mapping[str, str]) -> Allocation:
    """Return the allocation described by `env`; one machine if nothing describes more.

    Raises: TopologyError if the variables contradict each other.
    """
    return (
        _elastic_pod_allocation(env)
        or _pod_allocation(env)
        or _task_allocation(env)
        or Allocation()
    )


def _elastic_pod_allocation(env: Mapping[str, str]) -> Allocation | None:
    """Return the allocation in torchrun's variables (PET_*), as the Kubernetes training operator sets them."""
    if "PET_NNODES" not in env:
        return None
    min_machines, max_machines = split_range(env["PET_NNODES"], "PET_NNODES")
    rank_text = env.get("PET_NODE_RANK") or env.get("JOB_COMPLETION_INDEX", "")
    per_pod = env.get("PET_NPROC_PER_NODE", "")
    endpoint = env.get("PET_RDZV_ENDPOINT", "")
    address = (
        env.get("PET_MASTER_ADDR")
        or env.get("MASTER_ADDR")
        or endpoint.rpartition(":")[0]
        or None
    )
    port_text = (
        env.get("PET_MASTER_PORT")
        or env.get("MASTER_PORT")
        or endpoint.rpartition(":")[2]
    )
    if max_machines == 1 and not per_pod.isdecimal():
        return None
    return Allocation(
        source="Kubernetes (PET_*)",
        num_machines=max_machines,
        min_machines=min_machines,
        machine_rank=int(rank_text) if rank_text.isdecimal() else None,
        address=address,
        port=int(port_text) if port_text.isdecimal() else DEFAULT_PORT,
        per_machine=int(per_pod) if per_pod.isdecimal() else None,
    )


def _pod_allocation(env: Mapping[str, str]) -> Allocation | None:
    """Return the allocation of one command per pod: RANK of WORLD_SIZE (or NODE_RANK of NNODES), without LOCAL_RANK."""
    address = env.get("MASTER_ADDR") or jobset_host(env)
    if "LOCAL_RANK" in env or not address:
        return None
    for rank_name, size_name in (
        ("NODE_RANK", "NNODES"),
        ("RANK", "WORLD_SIZE"),
        ("JOB_COMPLETION_INDEX", "NNODES"),
    ):
        rank_text = env.get(rank_name, "")
        size_text = env.get(size_name, "")
        if rank_text.isdecimal() and size_text.isdecimal() and int(size_text) > 1:
            if int(rank_text) >= int(size_text):
                raise TopologyError(
                    f"{rank_name}={rank_text} with {size_name}={size_text} is impossible: machines count from 0 to {size_name}-1. "
                    f"Make the variables agree, or unset those of another launcher."
                )
            port_text = env.get("MASTER_PORT", "")
            return Allocation(
                source=f"{rank_name} and {size_name}",
                num_machines=int(size_text),
                min_machines=int(size_text),
                machine_rank=int(rank_text),
                address=address,
                port=int(port_text) if port_text.isdecimal() else DEFAULT_PORT,
            )
    return None


def _task_allocation(env: Mapping[str, str]) -> Allocation | None:
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
    low_text, _, high_text = text.strip().partition(":")
    high_text = high_text or low_text
    if (
        low_text.isdecimal()
        and high_text.isdecimal()
        and 1 <= int(low_text) <= int(high_text)
    ):
        return int(low_text), int(high_text)
    raise ConfigError(
        f"{name}={text!r} is not a number of machines; write one number, or min:max such as 2:4."
    )


def _split_address(rendezvous: str | None) -> tuple[str | None, int | None]:
    """Return the host and the port in tcp://host:port."""
    if not rendezvous:
        return None, None
    host, _, port = rendezvous.removeprefix("tcp://").rpartition(":")
    return host.strip("[]"), int(port)
