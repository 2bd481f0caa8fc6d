"""Evidence of a stall: states that ranks post now, seen twice. What a rank has posted earlier proves nothing about its present wait.

A rank posts again and again while it waits, and numbers its posts. One that stops posting holds the interpreter in native code, is stopped or
lost; its last state is dropped. A diagnosis counts when every rank on which it rests has posted two more states, and those that wait are still in
the same call with no collective begun meanwhile: then all of them waited at the moment of the first look.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from hasten.trust.divergence.state import Seen, State
from hasten.trust.stall.diagnose import Diagnosis

_SLACK: Final = 5.0
"""Ticks by which a post may be late: a busy machine lets watchdogs wait, too."""
_POSTS: Final = 2
"""The next post may have been looked at before the first look; the one after it was not."""


def pause_s(tick_s: float, quiet_s: float) -> float:
    """Return seconds between two posts of a rank that has waited for `quiet_s`: ever longer, the longer the wait."""
    return min(max(tick_s, 0.1 * quiet_s), 10.0)


@dataclass(frozen=True, slots=True)
class _Mark:
    """One rank's state at the first look."""

    turn: int
    wait: tuple[object, ...]
    """Call and counters of a rank that waits; empty for others."""


class Evidence:
    """Decides which states are of now, and whether a second look agrees with the first."""

    def __init__(self, rank: int, tick_s: float) -> None:
        self._rank = rank
        self._tick_s = tick_s
        self._posts: dict[int, tuple[int, float]] = {}
        self._key: tuple[object, ...] = ()
        self._marks: dict[int, _Mark] = {}

    @property
    def suspects(self) -> bool:
        """Whether a diagnosis waits for its confirmation."""
        return bool(self._key)

    def forget(self) -> None:
        """Drop the first look."""
        self._key, self._marks = (), {}

    def fresh(self, states: Mapping[int, State], now: float) -> dict[int, State]:
        """Return the states whose ranks still post."""
        found: dict[int, State] = {}
        for rank, state in states.items():
            if self._posts.get(rank, (-1, 0.0))[0] != state.turn:
                self._posts[rank] = (state.turn, now)
            age = now - self._posts[rank][1]
            if rank == self._rank or age <= 2 * pause_s(self._tick_s, state.quiet_s + age) + _SLACK * self._tick_s:
                found[rank] = state
        return found

    def confirms(self, found: Diagnosis, world: Sequence[Seen]) -> bool:
        """Whether the states in `world` confirm a diagnosis that earlier ones led to; the next call compares with these."""
        marks = {seen.rank: _mark(seen.state, seen.rank in found.waiting) for seen in world if seen.state is not None}
        same = found.key == self._key and {rank: mark.wait for rank, mark in marks.items()} == {
            rank: mark.wait for rank, mark in self._marks.items()
        }
        newer = same and all(
            mark.turn >= self._marks[rank].turn + _POSTS for rank, mark in marks.items() if rank != self._rank
        )
        if newer or not same:
            self._key, self._marks = found.key, marks
        return newer


def _mark(state: State, waits: bool) -> _Mark:
    return _Mark(state.turn, (state.spot, state.kind, tuple(sorted(state.counts.items()))) if waits else ())
