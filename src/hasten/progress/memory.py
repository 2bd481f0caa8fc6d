"""Memory of this process on its device, cheap enough to read a few times a second."""

from __future__ import annotations

import resource
import sys
from pathlib import Path

import torch

from hasten.runtime.devices import kind_of


class MemoryGauge:
    """Bytes in use by this process, and how many there are."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._module = None if device.type == "cpu" or kind_of(device).lazy else torch.get_device_module(device)
        self.total_bytes = self._total()

    def used_bytes(self) -> int | None:
        """Memory the process holds: reserved by torch on a device, resident on the host."""
        if self._module is None:
            return _resident_bytes()
        reserved = getattr(self._module, "memory_reserved", None)
        return None if reserved is None else int(reserved(self._device))

    def _total(self) -> int | None:
        properties = getattr(self._module, "get_device_properties", None)
        if properties is None:
            return None
        total = getattr(properties(self._device), "total_memory", None)
        return None if total is None else int(total)


def _resident_bytes() -> int:
    statm = Path("/proc/self/statm")
    if statm.exists():
        return int(statm.read_text().split()[1]) * resource.getpagesize()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # macOS counts bytes, others kilobytes
