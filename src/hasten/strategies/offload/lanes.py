"""Copy streams beside the compute stream, one for each direction, and the device memory that fetched state may use."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

Pairs = Iterable[tuple[Tensor, Tensor]]
"""Targets with their sources."""
Mark = Any  # an event of the device; None where copies are finished when they return


class HostLanes:
    """Copies on the CPU, where the device's memory is host memory: each is finished when it returns."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def follow_current_stream(self) -> None:
        """Take the current stream as the compute stream."""

    def empty(self, num_bytes: int) -> Tensor:
        """Allocate device memory in the order of the compute stream."""
        return torch.empty(num_bytes, dtype=torch.uint8, device=self.device)

    def grow(self, memory: Tensor, num_bytes: int) -> None:
        """Allocate the storage of a tensor anew, in the order of the compute stream."""
        memory.untyped_storage().resize_(num_bytes)

    def fetch(self, pairs: Pairs, after: Mark = None) -> Mark:
        """Queue copies to the device, after the compute stream's work so far and the mark `after`; return their mark."""
        return _copied(pairs)

    def store(self, pairs: Pairs) -> Mark:
        """Queue copies to the host, after the compute stream's work so far; return their mark."""
        return _copied(pairs)

    def compute_waits(self, mark: Mark) -> None:
        """Make later work of the compute stream wait for a mark."""

    def host_waits(self, mark: Mark) -> None:
        """Block until the work before a mark is done."""


def _copied(pairs: Pairs) -> None:
    for target, source in pairs:
        target.copy_(source)


class DeviceLanes(HostLanes):
    """Streams of an accelerator: one for copies to the device, one for copies to the host."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._arriving = torch.Stream(device)
        self._leaving = torch.Stream(device)
        self._compute = torch.accelerator.current_stream(device)

    def follow_current_stream(self) -> None:
        self._compute = torch.accelerator.current_stream(self.device)

    def empty(self, num_bytes: int) -> Tensor:
        with _current(self._compute):
            return torch.empty(num_bytes, dtype=torch.uint8, device=self.device)

    def grow(self, memory: Tensor, num_bytes: int) -> None:
        with _current(self._compute):
            memory.untyped_storage().resize_(num_bytes)

    def fetch(self, pairs: Pairs, after: Mark = None) -> Mark:
        if after is not None:
            self._arriving.wait_event(after)
        return self._queue(pairs, self._arriving)

    def store(self, pairs: Pairs) -> Mark:
        return self._queue(pairs, self._leaving)

    def compute_waits(self, mark: Mark) -> None:
        if mark is not None:
            self._compute.wait_event(mark)

    def host_waits(self, mark: Mark) -> None:
        if mark is not None:
            mark.synchronize()

    def _queue(self, pairs: Pairs, stream: torch.Stream) -> Mark:
        earlier = torch.Event(self.device)
        earlier.record(self._compute)
        stream.wait_event(earlier)
        with _current(stream):
            for target, source in pairs:
                target.copy_(source, non_blocking=True)
        done = torch.Event(self.device)
        done.record(stream)
        return done


@contextmanager
def _current(stream: torch.Stream) -> Iterator[None]:
    before = torch.accelerator.current_stream(stream.device)
    torch.accelerator.set_stream(stream)
    try:
        yield
    finally:
        torch.accelerator.set_stream(before)


def lanes_for(device: torch.device) -> HostLanes:
    """Return the copy lanes of a device."""
    return HostLanes(device) if device.type == "cpu" else DeviceLanes(device)


def allocated_bytes(device: torch.device) -> Callable[[], int] | None:
    """Return a function for the bytes that tensors occupy on the device; None where torch does not count them."""
    if device.type != "cuda":
        return None

    def count() -> int:
        counted: int = torch.cuda.memory_stats_as_nested_dict(device)["allocated_bytes"]["all"]["current"]
        return counted

    return count


class MemoryBudget:
    """Limit of the device memory for fetched state: a fixed part, and what activations leave free below the run's peak.

    The peak is the largest memory use seen without fetched state, so that fetching ahead does not raise the peak of the run.
    """

    def __init__(self, floor_bytes: int, allocated: Callable[[], int] | None) -> None:
        self.floor_bytes = floor_bytes
        self._allocated = allocated
        self._peak = 0
        self._last = 0
        self._growth = 0

    def sample(self, held: int) -> None:
        """Record the current memory use; `held` bytes of it are fetched state."""
        if self._allocated is not None:
            used = self._allocated() - held
            self._growth = max(self._growth, used - self._last)
            self._peak = max(self._peak, used)
            self._last = used

    def fits(self, held: int, more: int, later: int = 0) -> bool:
        """Return whether `more` bytes may be fetched beside `held` ones; `later` bytes will be allocated by others."""
        if held + more <= self.floor_bytes:
            return True
        return self._allocated is not None and self._allocated() + more + later <= self._peak

    def is_tight(self, held: int) -> bool:
        """Return whether the next block's activations may need memory of the `held` bytes beyond the fixed part."""
        if held <= self.floor_bytes:
            return False
        return self._allocated is None or self._allocated() + self._growth > self._peak
