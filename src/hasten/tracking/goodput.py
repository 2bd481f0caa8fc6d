"""Goodput of a run: the time in useful steps divided by the wall time, and the causes of the rest.

A step is useful if its update is part of the run's final state: steps after the checkpoint that a later load restored are void, and are
counted as replayed. All other time has one cause each, so that the parts add up to the wall time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from hasten.tracking.run_log import USEFUL, LoggedRank

CAUSES: Final = (
    "useful",
    "startup",
    "data",
    "checkpoint",
    "evaluation",
    "stall",
    "restart",
    "replayed",
    "other",
)
"""Parts of the wall time; all but the first are losses."""
_IN_STEPS: Final = ("data", "checkpoint", "evaluation", "stall")


@dataclass(frozen=True, slots=True)
class Goodput:
    """Wall time of a run on one rank, by cause."""

    seconds: Mapping[str, float]
    """Seconds of each of `CAUSES`."""

    @property
    def wall_s(self) -> float:
        """The wall time: from the start of the first process to the last record."""
        return sum(self.seconds.values())

    @property
    def ratio(self) -> float:
        """The share of useful steps in the wall time; 0 for a run without any time."""
        return self.seconds["useful"] / self.wall_s if self.wall_s > 0 else 0.0


@dataclass(slots=True)
class _RunStart:
    """One start of the program on one rank."""

    log: LoggedRank
    began_s: float
    ended_s: float
    useful: NDArray[Any] = field(init=False)
    """Useful seconds of each step."""
    void: NDArray[np.bool_] = field(init=False)
    """True for steps that a later load has made void."""

    def __post_init__(self) -> None:
        steps = self.log.steps
        self.useful = np.sum(
            [steps[phase].astype(np.float64) for phase in USEFUL], axis=0
        )
        self.void = np.zeros(len(steps), dtype=np.bool_)

    @property
    def finished(self) -> bool:
        """True if `end_training()` was called: the time until the next start is not part of the run."""
        return any(event.get("event") == "ended" for event in self.log.events)


def account_time(rank_logs: Sequence[LoggedRank]) -> Goodput:
    """Return the goodput of one rank from its logs, in order of their start."""
    seconds = dict.fromkeys(CAUSES, 0.0)
    run_starts = [_run_start(rank_log) for rank_log in rank_logs if rank_log.started]
    for index, run_start in enumerate(run_starts):
        if index and not run_starts[index - 1].finished:
            seconds["restart"] += max(
                run_start.began_s - run_starts[index - 1].ended_s, 0.0
            )
        _mark_void_steps(run_starts, index)
        seconds_by_cause = _losses_of_start(run_start)
        for cause, spent_s in seconds_by_cause.items():
            seconds[cause] += spent_s
        seconds["other"] += max(
            run_start.ended_s
            - run_start.began_s
            - sum(seconds_by_cause.values())
            - float(run_start.useful.sum()),
            0.0,
        )
    for run_start in run_starts:
        seconds["replayed"] += float(run_start.useful[run_start.void].sum())
        seconds["useful"] += float(run_start.useful[~run_start.void].sum())
    return Goodput(seconds)


def _run_start(rank_log: LoggedRank) -> _RunStart:
    times = []
    for logged_event in rank_log.events:
        if "time" in logged_event:
            times.append(float(logged_event["time"]))
    last_s = float(rank_log.steps["time"][-1]) if len(rank_log.steps) else 0.0
    began_s = float(rank_log.started.get("process_began", rank_log.started["time"]))
    return _RunStart(
        rank_log,
        began_s,
        max(
            [*times, last_s, began_s + float(rank_log.started.get("startup_s") or 0.0)]
        ),
    )


def _losses_of_start(run_start: _RunStart) -> dict[str, float]:
    """Return the seconds of one start that were neither useful nor unknown, by cause."""
    steps = run_start.log.steps
    seconds_by_cause = {"startup": float(run_start.log.started.get("startup_s") or 0.0)}
    seconds_by_cause |= {
        phase: float(steps[phase].astype(np.float64).sum()) for phase in _IN_STEPS
    }
    for logged_event in run_start.log.events:
        # after the last update, such as the last evaluation
        for phase, spent_s in logged_event.get("rest", {}).items():
            if phase in seconds_by_cause:
                seconds_by_cause[phase] += float(spent_s)
    if len(steps):
        last_s = float(steps["time"][-1])
    else:
        last_s = run_start.began_s + seconds_by_cause["startup"]
    if any(
        logged_event.get("event") == "stalled" and logged_event["time"] > last_s
        for logged_event in run_start.log.events
    ):
        # a stall that ended the process
        seconds_by_cause["stall"] += max(run_start.ended_s - last_s, 0.0)
    return seconds_by_cause


def _mark_void_steps(run_starts: Sequence[_RunStart], index: int) -> None:
    """Mark the steps that the loads of one start have made void; a start that loads nothing makes all earlier steps void."""
    logged_events = run_starts[index].log.events
    loads = []
    for logged_event in logged_events:
        if logged_event.get("event") == "loaded" and "step" in logged_event:
            loads.append(logged_event)
    steps = run_starts[index].log.steps
    kinds = {logged_event.get("event") for logged_event in logged_events}
    if index and "loaded" not in kinds and (len(steps) or "begun" in kinds):
        for run_start in run_starts[:index]:
            run_start.void[:] = True
    for load in loads:
        saved_times = []
        for run_start in run_starts[: index + 1]:
            for logged_event in run_start.log.events:
                if (
                    logged_event.get("event") == "saved"
                    and logged_event.get("step") == load["step"]
                    and logged_event["time"] <= load["time"]
                ):
                    saved_times.append(logged_event["time"])
        if saved_times:
            for run_start in run_starts[: index + 1]:
                times = run_start.log.steps["time"]
                run_start.void |= (times > max(saved_times)) & (times <= load["time"])
        else:
            _mark_void_after(
                run_starts[: index + 1], int(load["step"]), float(load["time"])
            )


def _mark_void_after(
    run_starts: Sequence[_RunStart], loaded_step: int, before_s: float
) -> None:
    """Mark the steps after update number `step` as void: a copy in memory has no event of its save."""
    num_valid_steps = 0
    for run_start in run_starts:
        valid_rows = np.flatnonzero(
            ~run_start.void & (run_start.log.steps["time"] <= before_s)
        )
        run_start.void[valid_rows[max(loaded_step - num_valid_steps, 0) :]] = True
        num_valid_steps += min(len(valid_rows), max(loaded_step - num_valid_steps, 0))


def goodput_of_run(ranks: Sequence[LoggedRank]) -> Goodput | None:
    """Return the goodput of a run: that of its rank with the lowest; None without records.

    Ranks wait for each other, so the rank with the lowest share names the cause.
    """
    goodputs = []
    for rank in sorted({rank_log.rank for rank_log in ranks}):
        goodput = account_time([log for log in ranks if log.rank == rank])
        trained_s = goodput.seconds["useful"] + goodput.seconds["replayed"]
        if goodput.wall_s > 0 and trained_s > 0:
            goodputs.append(goodput)
    return min(goodputs, key=lambda goodput: goodput.ratio, default=None)
