"""Table of device kinds, and selection of this process's device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import torch

from hasten.errors import DeviceError


@dataclass(frozen=True, slots=True)
class DeviceKind:
    """Properties of a kind of device that torch.accelerator does not provide."""

    type: str
    backend: str | None
    """The collective library for its tensors (gloo copies them to host memory first); None if there is none."""
    indexed: bool = True
    """True if one host can have several devices of the kind."""
    autocast: tuple[torch.dtype, ...] = (torch.bfloat16, torch.float16)
    side_streams: bool = True
    """True if copies can run concurrently with compute on a separate stream."""
    lazy: bool = False
    """True if operations are recorded and executed together later: no streams, no events, no tensor addresses.

    Reading a tensor executes the operations that it depends on."""


KINDS: Final = (
    DeviceKind("cpu", "gloo", indexed=False, side_streams=False),
    DeviceKind("cuda", "nccl"),  # ROCm builds use the name cuda too
    DeviceKind("mps", None, indexed=False, side_streams=False),
    DeviceKind("xpu", "xccl"),
    DeviceKind("npu", "hccl"),
    DeviceKind("hpu", "hccl", autocast=(torch.bfloat16,)),
    DeviceKind("mlu", "cncl"),
    DeviceKind("musa", "mccl"),
    DeviceKind("sdaa", "tccl"),
    DeviceKind("mtia", "hccl"),
    DeviceKind(
        "xla",
        "gloo",
        indexed=False,
        autocast=(torch.bfloat16,),
        side_streams=False,
        lazy=True,
    ),
)


def kind_of(device: torch.device | str) -> DeviceKind:
    """Return the table row of a device; an unknown device type gets a default row."""
    device_type = torch.device(device).type
    return next(
        (kind for kind in KINDS if kind.type == device_type),
        DeviceKind(device_type, None),
    )


def choose_device(
    local_rank: int, cpu: bool = False, requested_device: str | None = None
) -> torch.device:
    """Return the device of this process: the CPU if requested, else the host's accelerator with index `local_rank`.

    Raises: DeviceError when the device does not exist.
    """
    if requested_device is not None:
        return _requested_device(requested_device, local_rank)
    if cpu:
        accelerator = None
    else:
        accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return torch.device("cpu")
    return _indexed_device(accelerator.type, local_rank)


def _requested_device(requested_device: str, local_rank: int) -> torch.device:
    device = torch.device(requested_device)
    if device.type == "cpu":
        return torch.device("cpu")
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None or accelerator.type != device.type:
        if accelerator is None:
            present_devices = "only the CPU"
        else:
            present_devices = f"{accelerator.type!r} and the CPU"
        raise DeviceError(
            f"device {requested_device!r} was asked for, but this machine has {present_devices}; choose one of those."
        )
    if ":" in requested_device:
        return device
    return _indexed_device(device.type, local_rank)


def _indexed_device(device_type: str, local_rank: int) -> torch.device:
    if not kind_of(device_type).indexed:
        return torch.device(device_type)
    num_devices = torch.accelerator.device_count()
    if local_rank >= num_devices:
        raise DeviceError(
            f"local rank {local_rank} has no device: this host shows {num_devices} {device_type} device(s). Two processes on one "
            f"device would fight over its memory; start at most {num_devices} process(es) on this host, or use the CPU "
            "(cpu=True, or `hasten launch --cpu`)."
        )
    return torch.device(device_type, local_rank)


def use_device(device: torch.device) -> None:
    """Make `device` the current device of this process, so that `cuda` without an index refers to it."""
    if device.type != "cpu" and kind_of(device).indexed and device.index is not None:
        torch.accelerator.set_device_index(device.index)


def pci_address(device: torch.device) -> str | None:
    """Return the device's PCI address in the notation of /sys; None if torch does not provide it."""
    if device.type != "cuda":
        return None
    # Any: torch's stubs omit the PCI fields
    device_properties: Any = torch.cuda.get_device_properties(device)
    return f"{device_properties.pci_domain_id:04x}:{device_properties.pci_bus_id:02x}:{device_properties.pci_device_id:02x}.0"


def empty_cache(device: torch.device) -> None:
    """Release cached, unused memory of the device to the driver."""
    if device.type == "cpu" or kind_of(device).lazy:
        return
    device_module = torch.get_device_module(device)
    if hasattr(device_module, "empty_cache"):
        device_module.empty_cache()


def free_memory(device: torch.device) -> int:
    """Return the bytes that can still be allocated on an accelerator; 0 if torch cannot report it."""
    if device.type == "cpu" or kind_of(device).lazy:
        return 0
    device_module = torch.get_device_module(device)
    if not (
        hasattr(device_module, "mem_get_info")
        and hasattr(device_module, "memory_reserved")
    ):
        return 0
    cached_bytes = int(device_module.memory_reserved(device)) - int(
        device_module.memory_allocated(device)
    )
    return int(device_module.mem_get_info(device)[0]) + cached_bytes
