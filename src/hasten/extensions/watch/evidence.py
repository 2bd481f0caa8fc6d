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
from hasten.extensions.watch.state import ObservedRank, State

_SLACK_TICKS: Final = 5.0
"""Number of ticks by which a post may be late: watchdogs are delayed on a busy machine, too."""
HEARTBEAT_TICKS: Final = 5
"""Number of ticks between two posts of a rank that makes progress."""
_FURTHER_POSTS: Final = 2
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
        self._latest_posts: dict[int, tuple[int, float]] = {}
        self._diagnosis_key: tuple[object, ...] = ()
        self._first_observations: dict[int, _FirstObservation] = {}

    def forget_observation(self) -> None:
        """Drop the first observation."""
        self._diagnosis_key = ()
        self._first_observations = {}

    def current_states(
        self, rank_states: Mapping[int, State], now_s: float
    ) -> dict[int, State]:
        """Return the states of ranks that still post."""
        current: dict[int, State] = {}
        for rank, rank_state in rank_states.items():
            if self._latest_posts.get(rank, (-1, 0.0))[0] != rank_state.turn:
                self._latest_posts[rank] = (rank_state.turn, now_s)
            age = now_s - self._latest_posts[rank][1]
            limit_s = 2 * HEARTBEAT_TICKS * self._tick_s
            if not rank_state.moves:
                limit_s = (
                    2 * pause_s(self._tick_s, rank_state.quiet_s + age)
                    + _SLACK_TICKS * self._tick_s
                )
            if rank == self._rank or age <= limit_s:
                current[rank] = rank_state
        return current

    def confirms_diagnosis(
        self, diagnosis: Diagnosis, observed_ranks: Sequence[ObservedRank]
    ) -> bool:
        """Return whether the states in `world` confirm the previous diagnosis; the next call compares with them."""
        observations = {}
        for observed_rank in observed_ranks:
            if observed_rank.state is not None:
                observations[observed_rank.rank] = _observe_rank(
                    observed_rank.state, observed_rank.rank in diagnosis.waiting
                )
        is_same = diagnosis.key == self._diagnosis_key and {
            rank: observation.wait for rank, observation in observations.items()
        } == {
            rank: observation.wait
            for rank, observation in self._first_observations.items()
        }
        is_confirmed = is_same and all(
            observation.turn >= self._first_observations[rank].turn + _FURTHER_POSTS
            for rank, observation in observations.items()
            if rank != self._rank
        )
        if is_confirmed or not is_same:
            self._diagnosis_key = diagnosis.key
            self._first_observations = observations
        return is_confirmed


def _observe_rank(rank_state: State, waits: bool) -> _FirstObservation:
    wait: tuple[object, ...] = ()
    if waits:
        counts = tuple(sorted(rank_state.counts.items()))
        wait = (rank_state.spot, rank_state.kind, counts)
    return _FirstObservation(
        rank_state.turn,
        wait,
    )
