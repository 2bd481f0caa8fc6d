"""Copying weights ahead: streams, page-locked staging buffers, device buffers that are used again, and the learned order of blocks."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

_BUFFERS = 2  # one is read into while the other one is copied from


class Staged:
    """A buffer, and the event after which its last copy is done."""

    def __init__(self, memory: Tensor) -> None:
        self.memory = memory
        self._event: torch.Event | None = None

    def sent(self, stream: torch.Stream | None) -> None:
        """Remember what has been queued on the stream so far as the last use of the buffer."""
        if stream is not None:
            if self._event is None:
                self._event = torch.Event(stream.device)
            self._event.record(stream)

    def wait(self) -> None:
        """Return when the buffer may be written to."""
        if self._event is not None:
            self._event.synchronize()


class Staging:
    """The buffers in turn; made when first used, page-locked if that is possible."""

    def __init__(self, num_bytes: int) -> None:
        self._num_bytes = num_bytes
        self._buffers: list[Staged] = []
        self._turn = 0

    @contextmanager
    def buffer(self, device: torch.device) -> Iterator[Staged]:
        """The next buffer, free to be written to."""
        if not self._buffers:
            self._buffers = [Staged(_memory(self._num_bytes)) for _ in range(_BUFFERS)]
        staged = self._buffers[self._turn % _BUFFERS]
        self._turn += 1
        staged.wait()
        yield staged


def _memory(num_bytes: int) -> Tensor:
    try:
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
    except RuntimeError:  # copies from ordinary memory are slower, and right all the same
        return torch.empty(num_bytes, dtype=torch.uint8)


Mark = Any  # an event of the device; opaque to whoever passes it on


class Lanes:
    """A stream for copies beside the one that computes, which is whatever stream is current at the moment."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.copies = torch.Stream(device)

    def memory(self, num_bytes: int) -> Tensor:
        """Device memory that copies may write to, from now until it is given back."""
        with torch.inference_mode(False):
            memory = torch.empty(num_bytes, dtype=torch.uint8, device=self.device)
        memory.record_stream(self.copies)  # when it is freed, others get it only after copies that are under way
        self.copies.wait_stream(self._computing())  # whoever used this memory before
        return memory

    def mark(self) -> Mark:
        """Return a mark that can be set in one lane and waited for in the other."""
        return torch.Event(self.device)

    def copy(self, pairs: Iterable[tuple[Tensor, Tensor]], ready: Mark) -> None:
        """Queue copies of sources to targets, and set `ready` when they are done."""
        before = self._computing()
        torch.accelerator.set_stream(self.copies)
        try:
            for target, source in pairs:
                target.copy_(source, non_blocking=True)
            ready.record(self.copies)
        finally:
            torch.accelerator.set_stream(before)

    def set_after_computing(self, done: Mark) -> None:
        """Set the mark when everything that has been queued for computing so far is done."""
        done.record(self._computing())

    def copies_wait(self, done: Mark) -> None:
        """Let copies that are queued from now on wait for a mark."""
        self.copies.wait_event(done)

    def computing_waits(self, ready: Mark) -> None:
        """Let computations that are queued from now on wait for a mark."""
        self._computing().wait_event(ready)

    def finish(self) -> None:
        """Return when the device has nothing left to do."""
        torch.accelerator.synchronize(self.device)

    def _computing(self) -> torch.Stream:
        return torch.accelerator.current_stream(self.device)


@dataclass(frozen=True, slots=True)
class Span:
    """Bytes start..stop of the buffer."""

    start: int
    stop: int

    def meets(self, other: Span) -> bool:
        """Return whether the two have bytes in common."""
        return self.start < other.stop and other.start < self.stop


class Ring:
    """Hands out spans of a buffer one after another and begins again at its start, so that the oldest go first."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.held: dict[Hashable, Span] = {}
        self._next = 0

    def take(self, key: Hashable, size: int, keep: Collection[Hashable]) -> tuple[Span, list[Hashable]] | None:
        """Return a span for `key`, and the keys that lose theirs to it; None when those to keep leave no room."""
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
        """Forget the spans of these keys."""
        for key in keys:
            self.held.pop(key, None)


class Order:
    """Predicts the next blocks from the last two, which tells the two uses of a shared block apart."""

    def __init__(self, count: int) -> None:
        """`count` blocks, first expected one after another and over again."""
        self._count = count
        self._after: dict[int, int] = {index: (index + 1) % count for index in range(count)}
        self._after_two: dict[tuple[int, int], int] = {}
        self._before, self._now = -1, count - 1

    def saw(self, index: int) -> None:
        """Take note that this block is used now."""
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
    """Indices to keep within a budget of bytes, evenly spread, so that between two of them there is time to fetch."""
    total = sum(sizes)
    if total <= budget:
        return list(range(len(sizes)))
    kept, taken, seen = [], 0, 0
    for index, size in enumerate(sizes):
        seen += size
        if taken + size <= budget and (taken + size) * total <= seen * budget + size * total // 2:
            kept.append(index)
            taken += size
    for index, size in enumerate(sizes):  # what rounding left over
        if index not in kept and taken + size <= budget:
            kept.append(index)
            taken += size
    return sorted(kept)
