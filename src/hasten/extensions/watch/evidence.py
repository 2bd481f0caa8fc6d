"""Evidence of a stall: current states, observed twice. An earlier post of a rank proves nothing about its present wait.

A rank posts repeatedly, and numbers its posts. A rank that stops posting is in native code without releasing the
interpreter, is stopped or lost; its last state is dropped. A diagnosis is confirmed when every rank involved has posted two more states,
and the waiting ranks are still in the same call with no collective started meanwhile: then all of them waited at the first observation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from hasten.extensions.watch.diagnose import Diagnosis
from hasten.extensions.watch.state import SeenState, State

_SLACK: Final = 5.0
"""Number of ticks by which a post may be late: watchdogs are delayed on a busy machine, too."""
HEARTBEAT_TICKS: Final = 5
"""Number of ticks between two posts of a rank that makes progress."""
_POSTS: Final = 2
"""Number of further posts required: the next one may stem from before the first observation, the second cannot."""


def pause_s(tick_s: float, quiet_s: float) -> float:
    """Return the seconds between two posts of a rank that has waited for `quiet_s`; the pause grows with the wait."""
    return min(max(tick_s, 0.1 * quiet_s), 10.0)


@dataclass(frozen=True, slots=True)
class _FirstObservation:
    """One rank's state at the first observation."""

    turn: int
    wait: tuple[object, ...]
    """Call and counters of a waiting rank; empty for others."""


class Evidence:
    """Filter for current states, and comparison of a diagnosis with the previous one."""

    def __init__(self, rank: int, tick_s: float) -> None:
        self._rank = rank
        self._tick_s = tick_s
        self._posts: dict[int, tuple[int, float]] = {}
        self._key: tuple[object, ...] = ()
        self._marks: dict[int, _FirstObservation] = {}

    def forget(self) -> None:
        """Drop the first observation."""
        self._key, self._marks = (), {}

    def fresh(self, states: Mapping[int, State], now: float) -> dict[int, State]:
        """Return the states of ranks that still post."""
        current: dict[int, State] = {}
        for rank, state in states.items():
            if self._posts.get(rank, (-1, 0.0))[0] != state.turn:
                self._posts[rank] = (state.turn, now)
            age = now - self._posts[rank][1]
            limit_s = 2 * HEARTBEAT_TICKS * self._tick_s
            if not state.moves:
                limit_s = 2 * pause_s(self._tick_s, state.quiet_s + age) + _SLACK * self._tick_s
            if rank == self._rank or age <= limit_s:
                current[rank] = state
        return current

    def confirms(self, found: Diagnosis, world: Sequence[SeenState]) -> bool:
        """Return whether the states in `world` confirm the previous diagnosis; the next call compares with them."""
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


def _mark(state: State, waits: bool) -> _FirstObservation:
    return _FirstObservation(state.turn, (state.spot, state.kind, tuple(sorted(state.counts.items()))) if waits else ())
