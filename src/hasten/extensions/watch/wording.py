"""Text of the stall report: its frame and a line for each rank. The sentences about cause and cure are in `diagnose.py`. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from hasten.extensions.watch.diagnose import Diagnosis
from hasten.extensions.watch.state import SeenState, State
from hasten.runtime.nodelist import ranks_in_words

_SHOWN_RANKS: Final = 16
_STACK_RANKS: Final = 4


def report(
    diagnosis: Diagnosis, world: Sequence[SeenState], waited_s: float, then: str
) -> str:
    """Return the whole report: the stall, every rank in a line, cause, cure and consequence, and the stacks."""
    states = {seen.rank: seen.state for seen in world if seen.state is not None}
    lines = [
        f"stalled: {ranks_in_words(diagnosis.waiting)} of {len(world)} waited {waited_s:.0f} s for other ranks",
        *_ranks(world),
        f"  cause: {diagnosis.sentence}.",
        f"  cure:  {diagnosis.cure}",
        f"  now:   {then}",
    ]
    shown = [*diagnosis.missing, *diagnosis.waiting][:_STACK_RANKS]
    for rank in shown:
        if (state := states.get(rank)) is not None and state.stack:
            lines += [
                f"  stack of rank {rank}:",
                *(f"    {line}" for line in state.stack),
            ]
    return "\n".join(lines)


def _ranks(world: Sequence[SeenState]) -> list[str]:
    """Return one line per group of ranks with the same activity, waiting ranks first."""
    groups: dict[str, list[int]] = {}
    for seen in world:
        groups.setdefault(_doing(seen), []).append(seen.rank)
    lines = [f"  {ranks_in_words(ranks)}: {words}" for words, ranks in groups.items()]
    if len(lines) > _SHOWN_RANKS:
        lines = [*lines[:_SHOWN_RANKS], f"  … and {len(lines) - _SHOWN_RANKS} more"]
    return lines


def _doing(seen: SeenState) -> str:
    if seen.status != "here" or seen.state is None:
        ended = (
            f" {seen.note.ended}" if seen.note is not None and seen.note.ended else ""
        )
        words = {
            "left": f"ended without an error{ended}",
            "failed": f"failed{': ' if ended else ''}{ended.strip()}",
            "gone": "its process has exited",
            "stopped": "stopped by a signal",
        }
        return words.get(seen.status, "does not respond")
    return _state_words(seen.state)


def _state_words(state: State) -> str:
    step = f", after {state.step} updates" if state.step else ""
    since = f"for {_rounded(state.quiet_s)} s"
    if state.moves:
        return f"is busy with other collectives, now at {state.spot.words()}{step}"
    if state.waits:
        return f"waits at {state.spot.words()} {since}{step}"
    doing = {
        "loader": "loads data at",
        "checkpoint": "saves or loads at",
        "compiling": "compiles at",
        "ending": "is in end_training() at",
        "over": "has reached the end of its program, but other threads keep its process alive, at",
    }.get(state.kind, "is in user code at")
    return f"{doing} {state.spot.words()} {since}{step}"


def _rounded(seconds: float) -> int:
    """Return whole seconds, so that ranks that started to wait together share a line."""
    return max(1, round(seconds))
