"""The order in which blocks are used: guessed at first, learned by watching, learned anew when it changes; no torch."""

from __future__ import annotations

from collections.abc import Iterator


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
        """The blocks expected next, nearest first; as many as there are blocks."""
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
