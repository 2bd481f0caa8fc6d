"""Text of the stall report: its frame and a line for each rank. The sentences about cause and cure are in `diagnose.py`. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from hasten.extensions.watch.diagnose import Diagnosis
from hasten.extensions.watch.state import ObservedRank, State
from hasten.runtime.nodelist import ranks_in_words

_SHOWN_RANKS: Final = 16
_STACK_RANKS: Final = 4


def render_report(
    diagnosis: Diagnosis,
    observed_ranks: Sequence[ObservedRank],
    waited_s: float,
    consequence: str,
) -> str:
    """Return the whole report: the stall, every rank in a line, cause, cure and consequence, and the stacks."""
    rank_states = {}
    for observed_rank in observed_ranks:
        if observed_rank.state is not None:
            rank_states[observed_rank.rank] = observed_rank.state
    report_lines = [
        f"stalled: {ranks_in_words(diagnosis.waiting)} of {len(observed_ranks)} waited {waited_s:.0f} s for other ranks",
        *_describe_ranks(observed_ranks),
        f"  cause: {diagnosis.sentence}.",
        f"  cure:  {diagnosis.cure}",
        f"  now:   {consequence}",
    ]
    shown_ranks = [*diagnosis.missing, *diagnosis.waiting][:_STACK_RANKS]
    for rank in shown_ranks:
        if (rank_state := rank_states.get(rank)) is not None and rank_state.stack:
            report_lines += [
                f"  stack of rank {rank}:",
                *(f"    {line_number}" for line_number in rank_state.stack),
            ]
    return "\n".join(report_lines)


def _describe_ranks(observed_ranks: Sequence[ObservedRank]) -> list[str]:
    """Return one line per group of ranks with the same activity, waiting ranks first."""
    groups: dict[str, list[int]] = {}
    for observed_rank in observed_ranks:
        groups.setdefault(_describe_activity(observed_rank), []).append(
            observed_rank.rank
        )
    report_lines = []
    for words, numbers in groups.items():
        report_lines.append(f"  {ranks_in_words(numbers)}: {words}")
    if len(report_lines) > _SHOWN_RANKS:
        report_lines = [
            *report_lines[:_SHOWN_RANKS],
            f"  … and {len(report_lines) - _SHOWN_RANKS} more",
        ]
    return report_lines


def _describe_activity(observed_rank: ObservedRank) -> str:
    if observed_rank.status != "here" or observed_rank.state is None:
        ended = ""
        if observed_rank.note is not None and observed_rank.note.ended:
            ended = f" {observed_rank.note.ended}"
        words = {
            "left": f"ended without an error{ended}",
            "failed": f"failed: {ended.strip()}" if ended else "failed",
            "gone": "its process has exited",
            "stopped": "stopped by a signal",
        }
        return words.get(observed_rank.status, "does not respond")
    return _state_words(observed_rank.state)


def _state_words(rank_state: State) -> str:
    step_words = f", after {rank_state.step} updates" if rank_state.step else ""
    duration_words = f"for {_whole_seconds(rank_state.quiet_s)} s"
    if rank_state.moves:
        return f"is busy with other collectives, now at {rank_state.spot.describe_line()}{step_words}"
    if rank_state.waits:
        return (
            f"waits at {rank_state.spot.describe_line()} {duration_words}{step_words}"
        )
    activity_words = {
        "loader": "loads data at",
        "checkpoint": "saves or loads at",
        "compiling": "compiles at",
        "ending": "is in end_training() at",
        "over": "has reached the end of its program, but other threads keep its process alive, at",
    }.get(rank_state.kind, "is in user code at")
    return f"{activity_words} {rank_state.spot.describe_line()} {duration_words}{step_words}"


def _whole_seconds(seconds: float) -> int:
    """Return whole seconds, so that ranks that started to wait together share a line."""
    return max(1, round(seconds))
