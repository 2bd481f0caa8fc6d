"""This machine for the wizard: devices, memory, and recommended settings. Does not import torch."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from hasten.config.sections.loop import PrecisionType
from hasten.launch.base import DeviceKind, describe_host

_GIB: Final = 1024**3
_BF16_CAPABILITY: Final = 8.0  # Ampere
_FP8_CAPABILITY: Final = 8.9  # Ada
_FP16_CAPABILITY: Final = 7.0  # Volta


@dataclass(frozen=True, slots=True)
class MachineFacts:
    """Properties of a machine that determine its settings."""

    device: DeviceKind = "cpu"
    num_devices: int = 0
    device_name: str = ""
    cores: int = 1
    memory_bytes: int = 0
    """Memory of one device in bytes; 0 if unknown."""
    host_memory_bytes: int = 0
    capability: float = 0.0
    """NVIDIA's compute capability; 0 for other devices."""
    cluster: str = ""
    """The scheduler that this shell runs under; empty if none."""

    @property
    def words(self) -> str:
        """Description of the machine in one line."""
        host = (
            f"{self.cores} cores, {self.host_memory_bytes / _GIB:.0f} GiB host memory"
        )
        if self.device == "cpu":
            device_text = f"no accelerator; {host}"
        else:
            memory_bytes = ""
            if self.memory_bytes:
                memory_bytes = f", {self.memory_bytes / _GIB:.0f} GiB each"
            device_text = f"{self.num_devices} x {self.device_name or self.device}{memory_bytes}; {host}"
        return f"{device_text}; under {self.cluster}" if self.cluster else device_text


def examine_machine() -> MachineFacts:
    """Return the current state of this machine."""
    host = describe_host()
    memory_bytes, capability = _examine_nvidia() if host.device == "cuda" else (0, 0.0)
    return MachineFacts(
        device=host.device,
        num_devices=host.num_devices,
        device_name=host.device_name,
        cores=host.cores,
        memory_bytes=memory_bytes,
        host_memory_bytes=host.memory_bytes,
        capability=capability,
        cluster=cluster_of(host.env),
    )


def recommended_precision(machine_facts: MachineFacts) -> tuple[PrecisionType, str]:
    """Return the recommended precision for the devices, and the reason."""
    if machine_facts.device == "tpu":
        return "bf16", "TPUs compute in bf16"
    if machine_facts.device == "cuda" and machine_facts.capability >= _BF16_CAPABILITY:
        return (
            "bf16",
            f"{machine_facts.device_name} computes bf16 at full speed and needs no loss scaling",
        )
    if machine_facts.device == "cuda" and machine_facts.capability >= _FP16_CAPABILITY:
        return "fp16", f"{machine_facts.device_name} is fast in fp16 but not in bf16"
    if machine_facts.device in ("rocm", "xpu", "npu"):
        return "bf16", "these accelerators compute in bf16"
    return "no", "full precision is the safe choice here"


def offers_fp8(machine_facts: MachineFacts) -> bool:
    """Return whether the devices can compute in fp8."""
    return (
        machine_facts.device == "cuda" and machine_facts.capability >= _FP8_CAPABILITY
    )


def cluster_of(env: Mapping[str, str]) -> str:
    """Return the scheduler whose variables are set; empty if none."""
    scheduler_variables = (
        ("SLURM_JOB_ID", "SLURM"),
        ("PET_NNODES", "Kubernetes"),
        ("OMPI_COMM_WORLD_SIZE", "OpenMPI"),
        ("PMI_SIZE", "MPI"),
    )
    return next(
        (name for variable, name in scheduler_variables if env.get(variable)), ""
    )


def _examine_nvidia() -> tuple[int, float]:
    """Return the memory of the smallest device in bytes and the lowest compute capability."""
    query = "--query-gpu=memory.total,compute_cap"
    command = ["nvidia-smi", query, "--format=csv,noheader,nounits"]
    try:
        output = subprocess.run(
            command, capture_output=True, text=True, timeout=20, check=True
        ).stdout
    # a machine without a working driver
    except (OSError, subprocess.SubprocessError):
        return 0, 0.0
    return parse_devices(output.splitlines())


def parse_devices(rows: Iterable[str]) -> tuple[int, float]:
    """Return the minimum memory in bytes and the minimum capability of rows such as `143771, 9.0`."""
    device_rows = []
    for row in rows:
        if row_match := re.fullmatch(r"\s*(\d+)\s*,\s*(\d+\.\d+)\s*", row):
            device_rows.append(row_match)
    if not device_rows:
        return 0, 0.0
    return min(int(row_match[1]) for row_match in device_rows) * 1024**2, min(
        float(row_match[2]) for row_match in device_rows
    )
