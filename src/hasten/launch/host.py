"""What a launcher must know about this machine: its name, cores, accelerators and environment. No torch, no guessing."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal

from hasten.runtime import env as environment

DeviceKind = Literal["cpu", "cuda", "rocm", "xpu", "npu", "tpu", "mps"]

_MEMORY: Final = (
    (Path("/proc/meminfo"), r"^MemTotal:\s+(\d+) kB", 1024),
    (Path("/sys/fs/cgroup/memory.max"), r"^(\d+)$", 1),
)
_VISIBLE: Final = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")


@dataclass(frozen=True, slots=True)
class Host:
    """This machine, as far as launching needs to know it."""

    name: str = "localhost"
    cores: int = 1
    device: DeviceKind = "cpu"
    num_devices: int = 0
    """Devices that processes may use: those present, less those hidden by variables such as CUDA_VISIBLE_DEVICES."""
    device_name: str = ""
    env: Mapping[str, str] = field(default_factory=dict)
    python: str = "python"
    programs: frozenset[str] = frozenset()
    """Launchers found on PATH."""
    memory_bytes: int = 0
    """Host memory; 0 where it is not known."""

    @property
    def device_words(self) -> str:
        """The devices in words, for tables."""
        if self.device == "cpu":
            return f"cpu ({self.cores} cores)"
        return f"{self.num_devices} x {self.device_name or self.device}"


def look() -> Host:
    """This machine as it is now."""
    env = environment.snapshot()
    device, count, name = _find_devices(env)
    programs = ("srun", "sbatch", "mpirun", "mpiexec", "deepspeed", "gcloud")
    return Host(
        name=socket.gethostname(),
        cores=usable_cores(),
        device=device,
        num_devices=count,
        device_name=name,
        env=env,
        python=sys.executable,
        programs=frozenset(p for p in programs if shutil.which(p)),
        memory_bytes=_memory(),
    )


def usable_cores() -> int:
    """Cores this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return max(1, len(os.sched_getaffinity(0)))
    return os.cpu_count() or 1


def _memory() -> int:
    """Host memory in bytes, or the container's limit where it is lower; 0 where it is not known."""
    found = []
    for path, pattern, unit in _MEMORY:
        try:
            match = re.search(pattern, path.read_text(), re.MULTILINE)
        except OSError:  # not Linux, or no container: the other file may know
            continue
        found += [int(match[1]) * unit] if match else []
    return min(found, default=0)


def _find_devices(env: Mapping[str, str]) -> tuple[DeviceKind, int, str]:
    """Kind, usable number and name of the accelerators; the first kind that is present wins."""
    if (names := _nvidia_names()) and (count := _visible(env, len(names))):
        return "cuda", count, names[0]
    if (count := _rocm_count()) and (count := _visible(env, count)):
        return "rocm", count, "AMD GPU"
    if count := len([*Path("/dev").glob("accel[0-9]*"), *Path("/dev/vfio").glob("[0-9]*")]):
        return "tpu", count, "TPU"
    if count := len(list(Path("/dev").glob("davinci[0-9]*"))):
        return "npu", count, "Ascend NPU"
    if shutil.which("xpu-smi") and (count := _xpu_count()):
        return "xpu", count, "Intel GPU"
    if sys.platform == "darwin" and os.uname().machine == "arm64":
        return "mps", 1, "Apple GPU"
    return "cpu", 0, ""


def _nvidia_names() -> list[str]:
    """One name for each NVIDIA device (or MIG slice), from the driver's own tool; empty without a working driver."""
    if not Path("/proc/driver/nvidia/version").exists() and not Path("/dev/nvidiactl").exists() and not _is_wsl():
        return []
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return [_nvidia_model(folder) for folder in sorted(Path("/proc/driver/nvidia/gpus").glob("*"))]
    listing = _output([tool, "-L"])
    slices = re.findall(r"^\s+(MIG [^\s:]+)", listing, re.MULTILINE)
    return slices or re.findall(r"^GPU \d+: (.+?) \(UUID", listing, re.MULTILINE)


def _is_wsl() -> bool:
    return Path("/dev/dxg").exists()


def _nvidia_model(folder: Path) -> str:
    found = re.search(r"^Model:\s*(.+)$", (folder / "information").read_text(), re.MULTILINE)
    return found[1] if found else "NVIDIA GPU"


def _rocm_count() -> int:
    """GPU nodes of AMD's kernel driver: those with a nonzero gpu_id."""
    nodes = Path("/sys/class/kfd/kfd/topology/nodes").glob("*/gpu_id")
    return sum(1 for node in nodes if node.read_text().strip() not in ("", "0"))


def _xpu_count() -> int:
    return len(re.findall(r"Device ID|\|\s*\d+\s*\|", _output(["xpu-smi", "discovery"])))


def _visible(env: Mapping[str, str], present: int) -> int:
    """How many of `present` devices the variables leave visible."""
    for name in _VISIBLE:
        if name in env:
            ids = [item for item in env[name].split(",") if item.strip()]
            stop = next((i for i, item in enumerate(ids) if item.strip() == "-1"), len(ids))
            return min(stop, present)
    return present


def _output(command: list[str]) -> str:
    """What a tool prints; nothing if it fails, which is what a machine without a working driver looks like."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return ""
