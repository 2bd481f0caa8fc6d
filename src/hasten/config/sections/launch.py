"""Settings of the launch: processes, machines and their rendezvous."""

from collections.abc import Mapping
from datetime import timedelta
from typing import Any, Final, Literal

from hasten.config.base import Section, SectionNames, setting, settings, with_extensions

Rendezvous = Literal["static", "c10d"]
OWN_LAUNCHERS: Final = ("auto", "single", "torchrun", "slurm")
"""The values of `launcher` with which hasten starts the processes itself; others name a launch target."""


@settings
class InitProcessGroupKwargs(Section):
    """Options of torch.distributed.init_process_group."""

    section_names = SectionNames(is_handler=True)

    backend: str | None = setting(
        None, "communication backend (default: by device, nccl or gloo)"
    )
    init_method: str | None = setting(
        None, "URL of the rendezvous (default: environment)"
    )
    timeout: timedelta | None = setting(None, "timeout of a collective during training")
    init_timeout: timedelta | None = setting(
        None, "timeout for all processes to join at the start"
    )


@settings
@with_extensions("launch.")
class LaunchConfig(Section):
    """Machines, processes and their rendezvous."""

    num_processes: int | None = setting(
        None, "processes over all machines (default: one per device)", minimum=1
    )
    processes_per_machine: int | None = setting(
        None,
        "processes on this machine; machines may differ (instead of num_processes)",
        minimum=1,
    )
    num_machines: int = setting(1, "machines", minimum=1, maximum=1_000_000)
    nnodes: str | None = setting(
        None, "elastic number of machines, min:max (instead of num_machines)"
    )
    machine_rank: int | None = setting(
        None, "number of this machine, from 0 (default: from the cluster)", minimum=0
    )
    main_process_ip: str | None = setting(None, "address of machine 0")
    main_process_port: int | None = setting(
        None, "port on machine 0 (0 = a free one)", minimum=0, maximum=65535
    )
    multi_gpu: bool = setting(False, "use all devices of this machine")
    tpu: bool = setting(False, "train on TPUs")
    gpu_ids: tuple[int, ...] | Literal["all"] = setting(
        "all", "devices used on this machine, such as 0,1"
    )
    num_cpu_threads_per_process: int | None = setting(
        None,
        "OMP threads of a process (default: cores / processes)",
        minimum=1,
        maximum=4096,
    )
    enable_cpu_affinity: bool = setting(
        False, "bind each process to the cores near its device"
    )
    same_network: bool = setting(True, "machines reach each other directly")
    rdzv_backend: Rendezvous = setting("static", "how machines find each other")
    rdzv_endpoint: str | None = setting(
        None, "host:port of the rendezvous (default: main_process_ip:port)"
    )
    rdzv_id: str | None = setting(None, "name of the rendezvous")
    rdzv_conf: str | None = setting(
        None, "further options of the rendezvous, key=value,…"
    )
    max_restarts: int = setting(0, "restarts after a failed process", minimum=0)
    stop_grace_s: float = setting(
        120.0,
        "seconds for processes to save and exit after SIGTERM or SIGUSR1 before they are killed",
        minimum=0,
    )
    monitor_interval: float = setting(
        0.1, "seconds between two checks of the processes", minimum=0
    )
    role: str = setting("default", "role name of the processes")
    log_dir: str | None = setting(None, "folder of one log file per process", path=True)
    tee: str | None = setting(
        None,
        "also print logs: 0 none, 1 stdout, 2 stderr, 3 both, or rank:n,…",
        short="t",
    )
    module: bool = setting(
        False, "the script is a module name, as in python -m", short="m"
    )
    no_python: bool = setting(False, "the script is a program, not run by Python")
    quiet: bool = setting(False, "print less", short="q")
    launcher: str = setting(
        "auto",
        "what starts the processes: auto, single, torchrun, slurm, or a launch target",
    )
    check_in: Literal["error", "warn", "off"] = setting(
        "error", "what to do if machines differ in settings, code or package versions"
    )
    mpirun_hostfile: str | None = setting(
        None, "hostfile of mpirun for many CPU machines", path=True
    )
    mpirun_ccl: int | None = setting(
        None, "oneCCL worker threads under mpirun", minimum=0
    )
    submit: str | None = setting(
        None,
        "write and submit a job: slurm for a batch script, or a launch target of an extension, such as kubernetes",
    )
    submit_options: Mapping[str, Any] = setting(
        factory=dict, help="options of the batch script, such as partition and time"
    )
