"""Space for weights ahead of their use: a ring allocator, the learned order of blocks, the choice of resident ones."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Span:
    """Byte range start..stop of the buffer."""

    start: int
    stop: int

    def overlaps(self, other_span: Span) -> bool:
        """Return whether the two ranges overlap."""
        return self.start < other_span.stop and other_span.start < self.stop


class Ring:
    """Ring allocator of byte ranges in a buffer, which overwrites the oldest first."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.spans_by_key: dict[Hashable, Span] = {}
        self._next = 0

    def reserve_range(
        self, key: Hashable, size: int, keep: Collection[Hashable]
    ) -> tuple[Span, list[Hashable]] | None:
        """Return a range for `key` and the evicted keys; None if the keys in `keep` leave no space."""
        fixed_spans = []
        for ring_key, fixed_span in self.spans_by_key.items():
            if ring_key in keep:
                fixed_spans.append(fixed_span)
        fixed_stops = sorted(fixed_span.stop for fixed_span in fixed_spans)
        for start in (self._next, 0, *fixed_stops):
            span = Span(start, start + size)
            if span.stop > self.capacity:
                continue
            if any(map(span.overlaps, fixed_spans)):
                continue
            evicted_keys = []
            for ring_key, held_span in self.spans_by_key.items():
                if held_span.overlaps(span):
                    evicted_keys.append(ring_key)
            self.drop_ranges(evicted_keys)
            self.spans_by_key[key] = span
            self._next = span.stop
            return span, evicted_keys
        return None

    def drop_ranges(self, keys: Iterable[Hashable]) -> None:
        """Remove the ranges of these keys."""
        for key in keys:
            self.spans_by_key.pop(key, None)


class BlockOrder:
    """Predictor of the next blocks from the last two, which distinguishes the two uses of a shared block."""

    def __init__(self, count: int) -> None:
        """Expect `count` blocks one after another, repeatedly, until other orders are seen."""
        self._count = count
        self._after: dict[int, int] = {
            index: (index + 1) % count for index in range(count)
        }
        self._after_two: dict[tuple[int, int], int] = {}
        self._previous_block = -1
        self._now = count - 1

    def record_use(self, index: int) -> None:
        """Record the use of this block."""
        self._after[self._now] = index
        self._after_two[self._previous_block, self._now] = index
        self._previous_block = self._now
        self._now = index

    def expected_blocks(self) -> Iterator[int]:
        """Yield the blocks expected next, nearest first; as many as there are blocks."""
        previous_block = self._previous_block
        current_block = self._now
        for _ in range(self._count):
            next_block = self._after_two.get(
                (previous_block, current_block), self._after.get(current_block)
            )
            if next_block is None:
                return
            yield next_block
            previous_block = current_block
            current_block = next_block


def spread_residents(sizes: list[int], budget: int) -> list[int]:
    """Return evenly spread indices within a budget of bytes, so that blocks between them can be fetched in time."""
    total_bytes = sum(sizes)
    if total_bytes <= budget:
        return list(range(len(sizes)))
    resident_indices = []
    resident_bytes = 0
    visited_bytes = 0
    for index, size in enumerate(sizes):
        visited_bytes += size
        if (
            resident_bytes + size <= budget
            and (resident_bytes + size) * total_bytes
            <= visited_bytes * budget + size * total_bytes // 2
        ):
            resident_indices.append(index)
            resident_bytes += size
    for index, size in enumerate(sizes):  # the budget left over by rounding
        if index not in resident_indices and resident_bytes + size <= budget:
            resident_indices.append(index)
            resident_bytes += size
    return sorted(resident_indices)
