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


def account(logs: Sequence[LoggedRank]) -> Goodput:
    """Return the goodput of one rank from its logs, in order of their start."""
    seconds = dict.fromkeys(CAUSES, 0.0)
    starts = [_start(log) for log in logs if log.started]
    for index, start in enumerate(starts):
        if index and not starts[index - 1].finished:
            seconds["restart"] += max(start.began_s - starts[index - 1].ended_s, 0.0)
        _void(starts, index)
        seconds_by_cause = _in_start(start)
        for cause, spent in seconds_by_cause.items():
            seconds[cause] += spent
        seconds["other"] += max(
            start.ended_s
            - start.began_s
            - sum(seconds_by_cause.values())
            - float(start.useful.sum()),
            0.0,
        )
    for start in starts:
        seconds["replayed"] += float(start.useful[start.void].sum())
        seconds["useful"] += float(start.useful[~start.void].sum())
    return Goodput(seconds)


def _start(log: LoggedRank) -> _RunStart:
    times = [float(event["time"]) for event in log.events if "time" in event]
    last = float(log.steps["time"][-1]) if len(log.steps) else 0.0
    began = float(log.started.get("process_began", log.started["time"]))
    return _RunStart(
        log,
        began,
        max([*times, last, began + float(log.started.get("startup_s") or 0.0)]),
    )


def _in_start(start: _RunStart) -> dict[str, float]:
    """Return the seconds of one start that were neither useful nor unknown, by cause."""
    steps = start.log.steps
    seconds_by_cause = {"startup": float(start.log.started.get("startup_s") or 0.0)}
    seconds_by_cause |= {
        phase: float(steps[phase].astype(np.float64).sum()) for phase in _IN_STEPS
    }
    for event in start.log.events:
        # after the last update, such as the last evaluation
        for phase, spent in event.get("rest", {}).items():
            if phase in seconds_by_cause:
                seconds_by_cause[phase] += float(spent)
    last = (
        float(steps["time"][-1])
        if len(steps)
        else start.began_s + seconds_by_cause["startup"]
    )
    if any(
        event.get("event") == "stalled" and event["time"] > last
        for event in start.log.events
    ):
        # a stall that ended the process
        seconds_by_cause["stall"] += max(start.ended_s - last, 0.0)
    return seconds_by_cause


def _void(starts: Sequence[_RunStart], index: int) -> None:
    """Mark the steps that the loads of one start have made void; a start that loads nothing makes all earlier steps void."""
    events = starts[index].log.events
    loads = [
        event for event in events if event.get("event") == "loaded" and "step" in event
    ]
    steps = starts[index].log.steps
    kinds = {event.get("event") for event in events}
    if index and "loaded" not in kinds and (len(steps) or "begun" in kinds):
        for start in starts[:index]:
            start.void[:] = True
    for load in loads:
        saved = [
            event["time"]
            for start in starts[: index + 1]
            for event in start.log.events
            if event.get("event") == "saved"
            and event.get("step") == load["step"]
            and event["time"] <= load["time"]
        ]
        if saved:
            for start in starts[: index + 1]:
                times = start.log.steps["time"]
                start.void |= (times > max(saved)) & (times <= load["time"])
        else:
            _void_after(starts[: index + 1], int(load["step"]), float(load["time"]))


def _void_after(starts: Sequence[_RunStart], step: int, before_s: float) -> None:
    """Mark the steps after update number `step` as void: a copy in memory has no event of its save."""
    valid = 0
    for start in starts:
        rows = np.flatnonzero(~start.void & (start.log.steps["time"] <= before_s))
        start.void[rows[max(step - valid, 0) :]] = True
        valid += min(len(rows), max(step - valid, 0))


def of_run(ranks: Sequence[LoggedRank]) -> Goodput | None:
    """Return the goodput of a run: that of its rank with the lowest; None without records.

    Ranks wait for each other, so the rank with the lowest share names the cause.
    """
    goodputs = [
        account([log for log in ranks if log.rank == rank])
        for rank in sorted({log.rank for log in ranks})
    ]
    goodputs = [
        goodput
        for goodput in goodputs
        if goodput.wall_s > 0
        and goodput.seconds["useful"] + goodput.seconds["replayed"] > 0
    ]
    return min(goodputs, key=lambda goodput: goodput.ratio, default=None)
