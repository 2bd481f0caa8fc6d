"""Launch plans as data (printed by --dry-run, compared by tests, executed by `run`), and detection of the host."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

from hasten.config import source
from hasten.config.masking import masked, masked_value
from hasten.config.root import Config
from hasten.config.source import SettingEntry
from hasten.runtime import env as environment
from hasten.runtime.topology import Topology

MeetingKind = Literal["fixed", "c10d"]


@dataclass(frozen=True, slots=True)
class Target:
    """The user's program: a script, a module name or any executable, and its arguments."""

    name: str
    args: tuple[str, ...] = ()
    module: bool = False
    no_python: bool = False


@dataclass(frozen=True, slots=True)
class LaunchRequest:
    """A launch request: resolved settings and the program to start."""

    config: Config
    target: Target
    handoff: str = ""
    """The settings as one string, passed to every process in HASTEN_CONFIG."""
    flags: tuple[str, ...] = ()
    """Command-line options as typed, for plans that repeat the command on other machines."""
    folder: str = "."
    """The folder in which the command was typed."""
    entries: Mapping[source.Path, SettingEntry] = field(default_factory=dict)
    """The settings that are not at their default, each with its source."""


@dataclass(frozen=True, slots=True)
class Proc:
    """One command to run, with the variables added to the launcher's environment."""

    argv: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    count: int = 1
    """Number of identical processes to start; the agent numbers them by RANK and LOCAL_RANK."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Meeting:
    """Rendezvous settings of a job: its machines, address, port and timeout."""

    kind: MeetingKind = "fixed"
    min_machines: int = 1
    max_machines: int = 1
    machine_rank: int | None = None
    """None: assigned after all machines have joined; the owner of `address` becomes 0, the rest follow by name."""
    address: str = "127.0.0.1"
    port: int = 0
    """0 selects a free port; only possible on one machine."""
    run_id: str = "hasten"
    join_timeout_s: float = 120.0
    options: Mapping[str, str] = field(default_factory=dict)

    @property
    def alone(self) -> bool:
        """True if the job has exactly one machine."""
        return self.max_machines == 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Supervision:
    """Settings of the elastic agent that supervises the processes of this machine."""

    max_restarts: int = 0
    monitor_interval_s: float = 0.1
    stop_grace_s: float = 120.0
    """Time that processes may take to exit after SIGTERM, long enough for a preempted run to save."""
    role: str = "default"
    log_dir: str | None = None
    tee: str | None = None
    quiet: bool = False
    debug: bool = False
    expected_world_size: int | None = None
    """Total number of processes over all machines, if the user set it; checked after all machines have joined."""
    check_in: Literal["error", "warn", "off"] = "error"


@dataclass(frozen=True, slots=True)
class PlannedFile:
    """A file that is written before any process starts."""

    path: str
    text: str
    executable: bool = False
    public: bool = False
    """True if the text was checked to hold no credentials, so that it is shown as it is."""


@dataclass(frozen=True, slots=True)
class Submitter:
    """The program that submits the job to a cluster, and a remedy where it is not installed."""

    program: str
    remedy: str


@dataclass(frozen=True, slots=True)
class LaunchPlan:
    """The exact commands of this machine, with notes that give the reasons for them."""

    launcher: str
    """Name of the launch target, or of hasten's own way to start processes: single, torchrun or task."""
    procs: tuple[Proc, ...]
    notes: tuple[str, ...] = ()
    meeting: Meeting | None = None
    supervision: Supervision = field(default_factory=Supervision)
    files: tuple[PlannedFile, ...] = ()
    target: Target | None = None
    submitter: Submitter | None = None
    """None for jobs that this command runs to their end."""

    def render_text(self) -> str:
        """Return the plan as readable text in shell syntax, with credentials masked."""
        plan_lines = [f"launcher: {self.launcher}"]
        plan_lines += [f"note: {note}" for note in self.notes]
        if self.meeting is not None:
            plan_lines.append("rendezvous: " + _meeting_words(self.meeting))
        if self.launcher == "torchrun":
            plan_lines.append("restarts: " + str(self.supervision.max_restarts))
        for planned_file in self.files:
            if planned_file.public:
                shown_text = planned_file.text
            else:
                shown_text = masked(planned_file.text)
            plan_lines += [
                f"file {planned_file.path}:",
                *("    " + text_row for text_row in shown_text.splitlines()),
            ]
        first_index = 0
        for proc in self.procs:
            last_index = first_index + proc.count - 1
            if proc.count == 1:
                process_title = f"process {first_index}"
            else:
                process_title = (
                    f"processes {first_index}-{last_index} (LOCAL_RANK counts up)"
                )
            first_index = last_index + 1
            plan_lines += [
                f"{process_title}:",
                *(
                    f"    {variable_name}={shlex.quote(masked_value(variable_name, variable_value))} \\"
                    for variable_name, variable_value in sorted(proc.env.items())
                ),
            ]
            plan_lines.append("    " + masked(shlex.join(proc.argv)))
        return "\n".join(plan_lines)


def _meeting_words(meeting: Meeting) -> str:
    if meeting.alone:
        return f"one machine, {meeting.address}, " + (
            f"port {meeting.port}" if meeting.port else "a free port"
        )
    min_machines = meeting.min_machines
    max_machines = meeting.max_machines
    if min_machines == max_machines:
        machines_text = f"{max_machines} machines"
    else:
        machines_text = f"{min_machines} to {max_machines} machines"
    if meeting.machine_rank is None:
        rank_text = "this machine's rank is assigned there"
    else:
        rank_text = f"rank {meeting.machine_rank}"
    options_text = "".join(
        f", {option_name}={option_value}"
        for option_name, option_value in sorted(meeting.options.items())
    )
    return (
        f"{machines_text} at {meeting.address}:{meeting.port} ({meeting.kind}), {rank_text}, "
        f"waiting up to {meeting.join_timeout_s:g} s{options_text}"
    )


@dataclass(frozen=True, slots=True)
class Allocation:
    """This command's position among the identical commands that the cluster started."""

    source: str = ""
    num_machines: int = 1
    min_machines: int = 1
    machine_rank: int | None = None
    address: str | None = None
    port: int | None = None
    per_machine: int | None = None
    """Number of processes that the cluster wants on each machine, if specified."""
    rank: Topology | None = None
    """Set if the cluster started one command per rank: no further processes are started, this command is the rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobShape:
    """The size of the job, and this machine's processes and rank."""

    num_processes: int
    """Processes on this machine."""
    min_machines: int = 1
    max_machines: int = 1
    machine_rank: int | None = None
    expected_world_size: int | None = None
    use_cpu: bool = True
    env: tuple[tuple[str, str], ...] = ()
    """Environment variables of every process on this machine."""
    notes: tuple[str, ...] = ()
    allocation: Allocation = field(default_factory=Allocation)


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchTarget:
    """A launcher or a batch system that starts the processes of a job in place of hasten.

    The core's are listed in `targets.py`; extensions offer theirs as `launch_targets`.
    """

    name: str
    is_chosen: Callable[[LaunchRequest], bool]
    """Raises ConfigError for settings that have no effect without this target."""
    plan: Callable[[LaunchRequest, Host], LaunchPlan]
    survey: Callable[[LaunchRequest, Host], Host] | None = None
    """Return the host with what only this target asks of the machine; called before the plan is made."""
    run: Callable[[LaunchPlan, Config, Host], int] | None = None
    """Run the plan and return the exit code; by default its one command is run, after its files were written."""
    runs_in_image: bool = False
    """True if the program runs in a container image or on other machines, so that this one needs neither its script nor its packages."""
    outlives_machines: Callable[[LaunchRequest], bool] | None = None
    """Return whether the job continues when a machine is lost; then one launcher on each machine starts all of its processes."""
    plan_machine: (
        Callable[[LaunchRequest, Host, JobShape], LaunchPlan | None] | None
    ) = None
    """Plan the processes of this machine, of a job that no target was chosen for; None leaves that to hasten."""


DeviceKind = Literal["cpu", "cuda", "rocm", "xpu", "npu", "tpu", "mps"]

_MEMORY: Final = (
    (Path("/proc/meminfo"), r"^MemTotal:\s+(\d+) kB", 1024),
    (Path("/sys/fs/cgroup/memory.max"), r"^(\d+)$", 1),
)
_VISIBLE_DEVICES: Final = (
    "CUDA_VISIBLE_DEVICES",
    "HIP_VISIBLE_DEVICES",
    "ROCR_VISIBLE_DEVICES",
)


@dataclass(frozen=True, slots=True)
class Mpi:
    """The installed MPI implementation and the hosts in the hostfile."""

    kind: str = "openmpi"
    """openmpi, or mpich (also Intel MPI, MVAPICH and Cray, which share the options used here)."""
    hosts: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Host:
    """Facts about this machine that launching needs."""

    name: str = "localhost"
    cores: int = 1
    device: DeviceKind = "cpu"
    num_devices: int = 0
    """Devices that processes may use: those present, except those hidden by variables such as CUDA_VISIBLE_DEVICES."""
    device_name: str = ""
    env: Mapping[str, str] = field(default_factory=dict)
    python: str = "python"
    programs: frozenset[str] = frozenset()
    """Programs of clusters found on PATH."""
    memory_bytes: int = 0
    """Host memory in bytes; 0 if unknown."""
    mpi: Mpi = field(default_factory=Mpi)
    """Detected for jobs of mpirun only."""
    tpu: Any = None  # Any: what the launch target for TPUs has found
    """The hosts of the TPU; None for a job without TPUs, or if they are unknown."""

    @property
    def device_words(self) -> str:
        """Description of the devices, for tables."""
        if self.device == "cpu":
            return f"cpu ({self.cores} cores)"
        return f"{self.num_devices} x {self.device_name or self.device}"


def describe_host() -> Host:
    """Return the current state of this machine."""
    variables = environment.snapshot()
    device, num_devices, device_name = _find_devices(variables)
    cluster_programs = ("sbatch", "kubectl", "gcloud")
    return Host(
        name=socket.gethostname(),
        cores=usable_cores(),
        device=device,
        num_devices=num_devices,
        device_name=device_name,
        env=variables,
        python=sys.executable,
        programs=frozenset(
            program for program in cluster_programs if shutil.which(program)
        ),
        memory_bytes=_memory_limit_bytes(),
    )


def usable_cores() -> int:
    """Return the number of cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return max(1, len(os.sched_getaffinity(0)))
    return os.cpu_count() or 1


def _memory_limit_bytes() -> int:
    """Return the host memory in bytes, or the container's limit if that is lower; 0 if unknown."""
    limits_bytes = []
    for limit_file, pattern, unit_bytes in _MEMORY:
        try:
            limit_match = re.search(pattern, limit_file.read_text(), re.MULTILINE)
        except OSError:  # not Linux, or no container: the other file may have the value
            continue
        limits_bytes += [int(limit_match[1]) * unit_bytes] if limit_match else []
    return min(limits_bytes, default=0)


def _find_devices(env: Mapping[str, str]) -> tuple[DeviceKind, int, str]:
    """Return the kind, usable number and name of the accelerators; the first kind found wins."""
    if (nvidia_names := _nvidia_names()) and (
        num_devices := _count_visible(env, len(nvidia_names))
    ):
        return "cuda", num_devices, nvidia_names[0]
    if (num_devices := _rocm_count()) and (
        num_devices := _count_visible(env, num_devices)
    ):
        return "rocm", num_devices, "AMD GPU"
    if num_devices := len(
        [*Path("/dev").glob("accel[0-9]*"), *Path("/dev/vfio").glob("[0-9]*")]
    ):
        return "tpu", num_devices, "TPU"
    if num_devices := len(list(Path("/dev").glob("davinci[0-9]*"))):
        return "npu", num_devices, "Ascend NPU"
    if num_devices := _xpu_count():
        return "xpu", num_devices, "Intel GPU"
    if sys.platform == "darwin" and os.uname().machine == "arm64":
        return "mps", 1, "Apple GPU"
    return "cpu", 0, ""


def _nvidia_names() -> list[str]:
    """Return one name per NVIDIA device (or MIG slice), as reported by the driver; empty without a working driver."""
    if shutil.which("nvidia-smi"):
        listing = _command_output(["nvidia-smi", "-L"])
    else:
        listing = ""
    mig_slices = re.findall(r"^\s+(MIG [^\s:]+)", listing, re.MULTILINE)
    return mig_slices or re.findall(r"^GPU \d+: (.+?) \(UUID", listing, re.MULTILINE)


def _rocm_count() -> int:
    """Return the number of GPU nodes listed by AMD's kernel driver: those with a nonzero gpu_id."""
    nodes = Path("/sys/class/kfd/kfd/topology/nodes").glob("*/gpu_id")
    return sum(1 for node in nodes if node.read_text().strip() not in ("", "0"))


def _xpu_count() -> int:
    if not shutil.which("xpu-smi"):
        return 0
    listing = _command_output(["xpu-smi", "discovery"])
    return len(re.findall(r"Device ID|\|\s*\d+\s*\|", listing))


def _count_visible(env: Mapping[str, str], num_present: int) -> int:
    """Return the number of the `present` devices that the environment variables leave visible."""
    for variable_name in _VISIBLE_DEVICES:
        if variable_name in env:
            device_ids = []
            for device_id in env[variable_name].split(","):
                if device_id.strip():
                    device_ids.append(device_id)
            num_visible = len(device_ids)
            for index, device_id in enumerate(device_ids):
                if device_id.strip() == "-1":
                    num_visible = index
                    break
            return min(num_visible, num_present)
    return num_present


def _command_output(command: list[str]) -> str:
    """Return the output of a command; empty if it fails, as it does on a machine without a working driver."""
    try:
        return subprocess.run(
            command, capture_output=True, text=True, timeout=20, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return ""
