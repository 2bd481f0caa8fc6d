"""Copies of weights ahead of their use: streams, staging buffers, a ring allocator, the learned order of blocks."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hasten.runtime.streams import on_stream

_BUFFERS = 2  # one is filled while the other one is copied from


class Staged:
    """Buffer with the event of its last copy."""

    def __init__(self, memory: Tensor) -> None:
        self.memory = memory
        self._event: torch.Event | None = None

    def sent(self, stream: torch.Stream | None) -> None:
        """Record the work queued on the stream so far as the last use of the buffer."""
        if stream is not None:
            if self._event is None:
                self._event = torch.Event(stream.device)
            self._event.record(stream)

    def wait(self) -> None:
        """Block until the buffer may be written to."""
        if self._event is not None:
            self._event.synchronize()


class WeightStaging:
    """Staging buffers used in rotation; allocated on first use, page-locked if possible."""

    def __init__(self, num_bytes: int) -> None:
        self._num_bytes = num_bytes
        self._buffers: list[Staged] = []
        self._turn = 0

    @contextmanager
    def buffer(self, device: torch.device) -> Iterator[Staged]:
        """Context manager that yields the next buffer, ready to be written to."""
        if not self._buffers:
            self._buffers = [Staged(_memory(self._num_bytes)) for _ in range(_BUFFERS)]
        staged = self._buffers[self._turn % _BUFFERS]
        self._turn += 1
        staged.wait()
        yield staged


def _memory(num_bytes: int) -> Tensor:
    try:
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
    except RuntimeError:  # copies from pageable memory are slower, but correct
        return torch.empty(num_bytes, dtype=torch.uint8)


Mark = Any  # an event of the device; opaque to its users


class CopyStreams:
    """Stream for copies beside the compute stream, which is the current stream at each call."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.copies = torch.Stream(device)

    def memory(self, num_bytes: int) -> Tensor:
        """Allocate device memory that the copy stream may write to until it is freed."""
        with torch.inference_mode(False):
            memory = torch.empty(num_bytes, dtype=torch.uint8, device=self.device)
        memory.record_stream(self.copies)  # once freed, it is reused only after pending copies
        self.copies.wait_stream(self._computing())  # earlier users of this memory
        return memory

    def mark(self) -> Mark:
        """Return an event that can be recorded on one stream and waited for on the other."""
        return torch.Event(self.device)

    def copy(self, pairs: Iterable[tuple[Tensor, Tensor]], ready: Mark) -> None:
        """Queue copies of sources to targets, and record `ready` after them."""
        with on_stream(self.copies):
            for target, source in pairs:
                target.copy_(source, non_blocking=True)
            ready.record(self.copies)

    def set_after_computing(self, done: Mark) -> None:
        """Record the event after all work queued on the compute stream so far."""
        done.record(self._computing())

    def copies_wait(self, done: Mark) -> None:
        """Make later copies wait for an event."""
        self.copies.wait_event(done)

    def computing_waits(self, ready: Mark) -> None:
        """Make later computations wait for an event."""
        self._computing().wait_event(ready)

    def finish(self) -> None:
        """Block until the device is idle."""
        torch.accelerator.synchronize(self.device)

    def _computing(self) -> torch.Stream:
        return torch.accelerator.current_stream(self.device)


@dataclass(frozen=True, slots=True)
class Span:
    """Byte range start..stop of the buffer."""

    start: int
    stop: int

    def meets(self, other: Span) -> bool:
        """Return whether the two ranges overlap."""
        return self.start < other.stop and other.start < self.stop


class Ring:
    """Ring allocator of byte ranges in a buffer, which overwrites the oldest first."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.held: dict[Hashable, Span] = {}
        self._next = 0

    def take(self, key: Hashable, size: int, keep: Collection[Hashable]) -> tuple[Span, list[Hashable]] | None:
        """Return a range for `key` and the evicted keys; None if the keys in `keep` leave no space."""
        fixed = [span for other, span in self.held.items() if other in keep]
        for start in (self._next, 0, *sorted(span.stop for span in fixed)):
            span = Span(start, start + size)
            if span.stop <= self.capacity and not any(span.meets(other) for other in fixed):
                lost = [other for other, old in self.held.items() if old.meets(span)]
                self.drop(lost)
                self.held[key] = span
                self._next = span.stop
                return span, lost
        return None

    def drop(self, keys: Iterable[Hashable]) -> None:
        """Remove the ranges of these keys."""
        for key in keys:
            self.held.pop(key, None)


class BlockOrder:
    """Predictor of the next blocks from the last two, which distinguishes the two uses of a shared block."""

    def __init__(self, count: int) -> None:
        """Expect `count` blocks one after another, repeatedly, until other orders are seen."""
        self._count = count
        self._after: dict[int, int] = {index: (index + 1) % count for index in range(count)}
        self._after_two: dict[tuple[int, int], int] = {}
        self._before, self._now = -1, count - 1

    def saw(self, index: int) -> None:
        """Record the use of this block."""
        self._after[self._now] = index
        self._after_two[self._before, self._now] = index
        self._before, self._now = self._now, index

    def ahead(self) -> Iterator[int]:
        """Yield the blocks expected next, nearest first; as many as there are blocks."""
        before, now = self._before, self._now
        for _ in range(self._count):
            following = self._after_two.get((before, now), self._after.get(now))
            if following is None:
                return
            yield following
            before, now = now, following


def spread(sizes: list[int], budget: int) -> list[int]:
    """Return evenly spread indices within a budget of bytes, so that blocks between them can be fetched in time."""
    total = sum(sizes)
    if total <= budget:
        return list(range(len(sizes)))
    kept, taken, seen = [], 0, 0
    for index, size in enumerate(sizes):
        seen += size
        if taken + size <= budget and (taken + size) * total <= seen * budget + size * total // 2:
            kept.append(index)
            taken += size
    for index, size in enumerate(sizes):  # the budget left over by rounding
        if index not in kept and taken + size <= budget:
            kept.append(index)
            taken += size
    return sorted(kept)
