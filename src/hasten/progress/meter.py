"""Rates and remaining time computed from counts of steps, samples and tokens. Pure arithmetic."""

from __future__ import annotations

import resource
import sys
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch

from hasten.runtime.devices import kind_of

_WINDOW = 30  # number of draws over which a rate is averaged


@dataclass(frozen=True, slots=True, kw_only=True)
class MeterReading:
    """Values of a display at one moment."""

    desc: str = ""
    step: int = 0
    total: int | None = None
    elapsed_s: float = 0.0
    eta_s: float | None = None
    steps_per_s: float = 0.0
    samples_per_s: float = 0.0
    tokens_per_s: float = 0.0
    mfu: float | None = None
    memory_bytes: int | None = None
    memory_total_bytes: int | None = None
    values: Mapping[str, float | str] = field(default_factory=dict)
    hint: str = ""


class Meter:
    """Counter of steps, samples and tokens over time."""

    def __init__(self, total_bytes: int | None, now_s: float, initial: int = 0) -> None:
        self.total = total_bytes
        self.samples = self.tokens = 0
        self._began_s = now_s
        self._marks: deque[tuple[float, int, int, int]] = deque(maxlen=_WINDOW)
        self.begin_at(initial)

    def begin_at(self, step: int) -> None:
        """Start counting at this step, reached by an earlier run; rates cover only later steps."""
        self.step = self._initial = step
        self._marks.clear()
        self._marks.append((self._began_s, step, 0, 0))

    def read(self, now_s: float, desc: str = "") -> MeterReading:
        """Return the rates since the oldest mark of the window and the time left, and add a mark."""
        then_s, steps, samples, tokens = self._marks[0]
        seconds = max(now_s - then_s, 1e-9)
        steps_per_s = (self.step - steps) / seconds
        eta_s: float | None = None
        if self.total is not None and steps_per_s > 0:
            eta_s = max(self.total - self.step, 0) / steps_per_s
        self._marks.append((now_s, self.step, self.samples, self.tokens))
        return MeterReading(
            desc=desc,
            step=self.step,
            total=self.total,
            elapsed_s=now_s - self._began_s,
            eta_s=eta_s,
            steps_per_s=steps_per_s,
            samples_per_s=(self.samples - samples) / seconds,
            tokens_per_s=(self.tokens - tokens) / seconds,
        )

    def read_all(self, now_s: float, desc: str = "") -> MeterReading:
        """Return the rates over the whole time, for the last line."""
        self._marks.clear()
        self._marks.append((self._began_s, self._initial, 0, 0))
        return self.read(now_s, desc)


class MemoryGauge:
    """Gauge of the memory used by this process, and of the device's total memory."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        if device.type == "cpu" or kind_of(device).lazy:
            self._module = None
        else:
            self._module = torch.get_device_module(device)
        self.total_bytes = self._read_total_bytes()

    def used_bytes(self) -> int | None:
        """Return the memory of the process: reserved by torch on a device, resident on the host."""
        if self._module is None:
            return _resident_bytes()
        reserved = getattr(self._module, "memory_reserved", None)
        return None if reserved is None else int(reserved(self._device))

    def _read_total_bytes(self) -> int | None:
        properties = getattr(self._module, "get_device_properties", None)
        if properties is None:
            return None
        total_bytes = getattr(properties(self._device), "total_memory", None)
        return None if total_bytes is None else int(total_bytes)


def _resident_bytes() -> int:
    statm = Path("/proc/self/statm")
    if statm.exists():
        return int(statm.read_text().split()[1]) * resource.getpagesize()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # macOS counts bytes, others kilobytes
    return peak if sys.platform == "darwin" else peak * 1024
