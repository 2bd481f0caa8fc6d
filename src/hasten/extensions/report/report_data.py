"""Data of the report page: charts reduced to a few thousand points, tables of settings and differences."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from itertools import pairwise
from types import MappingProxyType
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from hasten.extensions.report.run_folder import Curve, RunFolder
from hasten.tracking.goodput import Goodput
from hasten.tracking.run_log import PARTS, STEP_PARTS, LoggedRank

MOST_POINTS: Final = 4000
_BUCKETS: Final = 400
_EDGE_S: Final = 1e-3
COLOURS: Final = (
    *(
        "#1769aa",
        "#d1495b",
        "#2e8b57",
        "#8d5fd3",
        "#e08e0b",
        "#00838f",
        "#795548",
        "#546e7a",
    ),
    *("#c2185b", "#9e9d24", "#5c6bc0", "#ff8a65"),
)
"""Colours of the lines of a chart, at least one for each part of a step."""
_SECONDS: Final = ("runtime", "per_second")
_RATES: Final = ("tokens_per_second", "mfu")
"""Values of `track_throughput()`, which change during a run; other rates are totals at its end."""

# Any in this file: JSON values.


def thinned(curve: Curve, most: int = MOST_POINTS) -> Curve:
    """Return the curve with at most `most` points: minimum and maximum of each interval, to preserve peaks."""
    length = len(curve.values)
    if length <= most:
        return curve
    edges = np.linspace(0, length, most // 2 + 1).astype(int)
    keep: list[int] = []
    for first, last in pairwise(edges.tolist()):
        part = curve.values[first:last]
        if np.isnan(part).all():
            keep.append(first)
            continue
        keep += sorted(
            {first + int(np.nanargmin(part)), first + int(np.nanargmax(part))}
        )
    index = np.array(keep)
    return Curve(curve.steps[index], curve.times[index], curve.values[index])


def charts(runs: Sequence[RunFolder]) -> list[dict[str, Any]]:
    """Return all charts of the page, in order: metrics first, then throughput and the time of a step by part."""
    all_charts = [_metric_chart(name, runs) for name in _metric_names(runs)]
    has_several_runs = len(runs) > 1
    throughput = []
    for run in runs:
        for log in main_logs(run):
            throughput.append(_throughput(run, log, has_several_runs))
    all_charts.append(_time_chart("throughput (samples/s)", throughput))
    for run in runs:
        if logs := main_logs(run):
            title = "time of a step by part (ms)"
            if has_several_runs:
                title += f": {run.name}"
            chart = _time_chart(title, _step_parts(run, logs))
            all_charts.append({**chart, "stacked": True, "run": run.name})
    return [chart for chart in all_charts if any(t["y"] for t in chart["traces"])]


def main_logs(run: RunFolder) -> list[LoggedRank]:
    """Return the logs of rank 0 that have steps, one for each start of the program."""
    return [log for log in run.ranks if log.rank == 0 and len(log.steps)]


def _metric_names(runs: Sequence[RunFolder]) -> list[str]:
    names = dict.fromkeys(name for run in runs for name in run.curves)
    first = ("loss", "eval_loss", "learning_rate", "grad_norm")
    ordered = [name for name in first if name in names] + [
        name for name in names if name not in first
    ]
    plain = [
        name
        for name in ordered
        if name in _RATES or (name != "epoch" and not name.endswith(_SECONDS))
    ]
    return [
        name
        for name in plain
        if any(len(run.curves[name].values) > 1 for run in runs if name in run.curves)
    ]


def _metric_chart(name: str, runs: Sequence[RunFolder]) -> dict[str, Any]:
    traces = []
    for run in runs:
        if name in run.curves:
            curve = thinned(run.curves[name])
            minutes = (curve.times - run.began_s) / 60
            traces.append(
                _trace(run.name, minutes, curve.values, steps=curve.steps.tolist())
            )
    return {"title": name, "traces": traces, "metric": True}


def _time_chart(title: str, traces: list[dict[str, Any]]) -> dict[str, Any]:
    return {"title": title, "traces": traces, "metric": False}


def _trace(
    name: str, minutes: NDArray[Any], values: NDArray[Any], **more: Any
) -> dict[str, Any]:
    shown = [
        None if not np.isfinite(value) else float(f"{value:.6g}")
        for value in values.tolist()
    ]
    return {"name": name, "minutes": np.round(minutes, 5).tolist(), "y": shown, **more}


def _label(run: RunFolder, log: LoggedRank, has_several_runs: bool) -> str:
    words = [run.name] if has_several_runs else []
    words.append(f"rank {log.rank}")
    began = log.started.get("time", 0)
    if restarts := sum(
        other.started.get("time", 0) < began for other in main_logs(run)
    ):
        words.append(f"restart {restarts}")
    return ", ".join(words)


def _bucketed(
    log: LoggedRank, columns: Sequence[str]
) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return times and the sums of columns over intervals of steps, with the number of steps as the last column."""
    steps = log.steps
    edges = np.unique(
        np.linspace(0, len(steps), min(_BUCKETS, len(steps)) + 1).astype(int)
    )
    sums = [
        np.add.reduceat(steps[name].astype(np.float64), edges[:-1]) for name in columns
    ]
    return steps["time"][edges[1:] - 1], np.stack(
        [*sums, np.diff(edges).astype(np.float64)]
    )


def _minutes(run: RunFolder, times: NDArray[Any]) -> NDArray[Any]:
    return (times - run.began_s) / 60


def _throughput(
    run: RunFolder, log: LoggedRank, has_several_runs: bool
) -> dict[str, Any]:
    times, sums = _bucketed(log, [*STEP_PARTS, "samples"])
    seconds = np.maximum(sums[: len(STEP_PARTS)].sum(axis=0), 1e-9)
    return _trace(
        _label(run, log, has_several_runs),
        _minutes(run, times),
        sums[len(STEP_PARTS)] / seconds,
    )


def _step_parts(run: RunFolder, logs: Sequence[LoggedRank]) -> list[dict[str, Any]]:
    found = [_bucketed(log, PARTS) for log in logs]
    gap = np.array(
        [[0.0]] * len(PARTS) + [[1.0]]
    )  # between two starts: where values are missing, stacked areas become ramps
    times = np.concatenate(
        [
            np.concatenate([times[:1] - _EDGE_S, times, times[-1:] + _EDGE_S])
            for times, _ in found
        ]
    )
    sums = np.concatenate(
        [part for _, sums in found for part in (gap, sums, gap)], axis=1
    )
    return [
        _trace(part, _minutes(run, times), 1e3 * sums[index] / sums[-1])
        for index, part in enumerate(PARTS)
    ]


def last_values(runs: Sequence[RunFolder]) -> list[list[str]]:
    """Return a row per metric: its name, and for each run its last, lowest and highest value."""
    names = dict.fromkeys(name for run in runs for name in run.curves)
    return [[name, *(_last(run.curves.get(name)) for run in runs)] for name in names]


def _last(curve: Curve | None) -> str:
    if curve is None:
        return "—"
    if len(curve.values) == 1 or np.isnan(curve.values).all():
        return f"{curve.values[-1]:.6g}"
    return f"{curve.values[-1]:.6g} ({np.nanmin(curve.values):.6g} to {np.nanmax(curve.values):.6g})"


def unit(charts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the unit of the time axes, by the longest one: seconds, minutes or hours, and the units per minute."""
    longest = max(
        (
            max(trace["minutes"], default=0.0)
            for chart in charts
            for trace in chart["traces"]
        ),
        default=0.0,
    )
    if longest < 3:
        return {"name": "seconds", "per_minute": 60.0}
    return (
        {"name": "minutes", "per_minute": 1.0}
        if longest < 180
        else {"name": "hours", "per_minute": 1 / 60}
    )


def duration(minutes: float) -> str:
    """Return a duration as seconds below a minute, else as hours, minutes and seconds."""
    seconds = minutes * 60
    if abs(seconds) < 60:
        return f"{seconds:.3g} s"
    return str(timedelta(seconds=round(seconds)))


def events(runs: Sequence[RunFolder]) -> list[dict[str, Any]]:
    """Return the events of all runs, with their minutes since the start of the run."""
    return [
        {
            "run": run.name,
            **event,
            "minutes": round((event["time"] - run.began_s) / 60, 4),
        }
        for run in runs
        for event in run.events
    ]


def spread(run: RunFolder) -> list[list[str]]:
    """Return a row per rank: steps, mean and 95th percentile of the step time, and the share of each part."""
    rows = []
    for rank in sorted({log.rank for log in run.ranks}):
        logs = [log.steps for log in run.ranks if log.rank == rank and len(log.steps)]
        if not logs:
            continue
        steps = np.concatenate(logs)
        seconds = np.sum(
            [steps[part].astype(np.float64) for part in STEP_PARTS], axis=0
        )
        total = max(
            sum(float(steps[part].astype(np.float64).sum()) for part in PARTS), 1e-9
        )
        cells = [
            f"{1e3 * seconds.mean():.2f}",
            f"{1e3 * np.percentile(seconds, 95):.2f}",
        ]
        shares = [
            f"{float(steps[part].astype(np.float64).sum()) / total:.1%}"
            for part in PARTS
        ]
        rows.append([str(rank), str(len(steps)), *cells, *shares])
    return rows


_MEANINGS: Final = MappingProxyType(
    {
        "useful": "steps whose updates are part of the final state",
        "startup": "from the start of a process to its first request for a batch, with loading",
        "data": "waiting for batches of training",
        "checkpoint": "saving and loading during training",
        "evaluation": "batches that no backward pass used",
        "stall": "ranks waiting for each other, as the watchdog reported",
        "restart": "from the last record of a process to the start of the next, with the unfinished step",
        "replayed": "steps after the checkpoint that a later load restored",
        "other": "after the last step, and not measured",
    }
)


def causes(found: Goodput) -> list[list[str]]:
    """Return a row per cause of the wall time: its name, time, share and meaning; causes that took no time are left out."""
    wall = max(found.wall_s, 1e-9)
    return [
        [cause, duration(seconds / 60), f"{seconds / wall:.1%}", _MEANINGS[cause]]
        for cause, seconds in found.seconds.items()
        if seconds > 0 or cause == "useful"
    ]


def differences(runs: Sequence[RunFolder]) -> list[list[str]]:
    """Return a row per setting or fact that differs between runs: its name and its value in each."""
    tables = [
        {**{k: v for k, (v, _) in run.settings.items()}, **run.environment}
        for run in runs
    ]
    names = dict.fromkeys(name for table in tables for name in table)
    rows = [[name, *(table.get(name, "—") for table in tables)] for name in names]
    return [row for row in rows if len(set(row[1:])) > 1]
