"""Copy streams beside the compute stream, one for each direction, and the device memory that fetched state may use."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final, NamedTuple, Protocol

import torch
from torch import Tensor

from hasten.runtime.streams import on_stream

Pairs = Iterable[tuple[Tensor, Tensor]]
"""Targets with their sources."""
_USABLE: Final = 0.95  # of the memory of a device; allocators lose a part to gaps
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
        with on_stream(self._compute):
            return torch.empty(num_bytes, dtype=torch.uint8, device=self.device)

    def grow(self, memory: Tensor, num_bytes: int) -> None:
        with on_stream(self._compute):
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
        with on_stream(stream):
            for target, source in pairs:
                target.copy_(source, non_blocking=True)
        done = torch.Event(self.device)
        done.record(stream)
        return done


def lanes_for(device: torch.device) -> HostLanes:
    """Return the copy lanes of a device."""
    return HostLanes(device) if device.type == "cpu" else DeviceLanes(device)


class MemoryUse(Protocol):
    """Count of the memory of tensors on a device."""

    def now_and_most(self) -> tuple[int, int]:
        """Return the bytes that tensors occupy now, and at most so far."""
        ...

    def capacity(self) -> int:
        """Return the bytes that tensors may occupy together."""
        ...


class _CudaMemoryUse:
    def __init__(self, device: torch.device) -> None:
        self._device = device

    def now_and_most(self) -> tuple[int, int]:
        counted = torch.cuda.memory_stats_as_nested_dict(self._device)["allocated_bytes"]["all"]
        return counted["current"], counted["peak"]

    def capacity(self) -> int:
        free, _ = torch.cuda.mem_get_info(self._device)
        return int(_USABLE * (free + torch.cuda.memory_reserved(self._device)))


def memory_use(device: torch.device) -> MemoryUse | None:
    """Return the count of the memory of tensors on the device; None where torch does not count it."""
    return _CudaMemoryUse(device) if device.type == "cuda" else None


class MemoryBudget:
    """Limit of the device memory for fetched state: a fixed part, and what is free below the peak of the first step.

    The memory use of a step, sampled where blocks begin and gradients arrive, predicts that of the next one, so that fetched state fills what
    activations leave free. Between the last block and the first gradient, where the loss is computed, there is no sample: what is held then
    may raise the peak of the run, but not beyond the memory of the device.
    """

    def __init__(self, floor_bytes: int, use: MemoryUse | None) -> None:
        self.floor_bytes = floor_bytes
        self._use = use
        self._peak = 0
        self._samples: list[_Sample] = []
        self._previous: list[_Sample] = []
        self._updated = False

    def sample(self, held: int, in_forward: bool = False) -> None:
        """Record the current memory use; `held` bytes of it are fetched state."""
        if self._use is not None:
            now, peak = self._use.now_and_most()
            self._samples.append(_Sample(now - held, in_forward))
            self._peak = max(self._peak, now - held, 0 if self._updated else peak)

    def end_step(self) -> None:
        """Take the samples since the last call as the prediction for the next step."""
        self._previous, self._samples, self._updated = self._samples, [], True

    def fits_ahead(self, held: int, more: int) -> bool:
        """Return whether `more` bytes may be fetched during the backward, beside `held` ones."""
        coming = [sample.used for sample in self._previous[max(len(self._samples) - 1, 0) :]]
        return held + more <= self.floor_bytes or (bool(coming) and self._fits(held, more, max(coming)))

    def fits(self, held: int, more: int) -> bool:
        """Return whether `more` bytes may be fetched during the update, beside `held` ones."""
        return held + more <= self.floor_bytes or self._fits(held, more, 0)

    def is_tight(self, held: int) -> bool:
        """Return whether the next block, or the loss after it, may need memory of the `held` bytes beyond the fixed part."""
        if self._use is None or held <= self.floor_bytes:
            return held > self.floor_bytes
        count = len(self._samples)
        before, coming = self._previous[max(count - 1, 0) : count], self._previous[count:][:1]
        unseen = not coming or not coming[0].in_forward or bool(before and coming[0].used < before[0].used)
        if unseen and self._peak + held > self._use.capacity():
            return True
        return not self._fits(held, 0, coming[0].used if coming else self._peak)

    def _fits(self, held: int, more: int, coming: int) -> bool:
        if self._use is None:
            return False
        return max(self._use.now_and_most()[0] - held, coming) + held + more <= self._peak


class _Sample(NamedTuple):
    used: int
    """Bytes of tensors without fetched state."""
    in_forward: bool
