"""Where in a buffer of fixed size the next block goes, and which earlier blocks it overwrites; no torch."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Span:
    """Bytes start..stop of the buffer."""

    start: int
    stop: int

    def meets(self, other: Span) -> bool:
        """Whether the two have bytes in common."""
        return self.start < other.stop and other.start < self.stop


class Ring:
    """Hands out spans of a buffer one after another and begins again at its start, so that the oldest go first."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.held: dict[Hashable, Span] = {}
        self._next = 0

    def take(self, key: Hashable, size: int, keep: Collection[Hashable]) -> tuple[Span, list[Hashable]] | None:
        """A span for `key`, and the keys that lose theirs to it; None when those to keep leave no room."""
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
