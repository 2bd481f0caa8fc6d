"""Space for weights ahead of their use: a ring allocator, the learned order of blocks, the choice of resident ones."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Iterator
from dataclasses import dataclass


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

    def take(
        self, key: Hashable, size: int, keep: Collection[Hashable]
    ) -> tuple[Span, list[Hashable]] | None:
        """Return a range for `key` and the evicted keys; None if the keys in `keep` leave no space."""
        fixed = [span for other, span in self.held.items() if other in keep]
        for start in (self._next, 0, *sorted(span.stop for span in fixed)):
            span = Span(start, start + size)
            if span.stop <= self.capacity and not any(
                span.meets(other) for other in fixed
            ):
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
        self._after: dict[int, int] = {
            index: (index + 1) % count for index in range(count)
        }
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
        if (
            taken + size <= budget
            and (taken + size) * total <= seen * budget + size * total // 2
        ):
            kept.append(index)
            taken += size
    for index, size in enumerate(sizes):  # the budget left over by rounding
        if index not in kept and taken + size <= budget:
            kept.append(index)
            taken += size
    return sorted(kept)
