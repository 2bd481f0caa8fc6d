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


def thin_curve(curve: Curve, max_points: int = MOST_POINTS) -> Curve:
    """Return the curve with at most `most` points: minimum and maximum of each interval, to preserve peaks."""
    num_points = len(curve.values)
    if num_points <= max_points:
        return curve
    edges = np.linspace(0, num_points, max_points // 2 + 1).astype(int)
    kept_indices: list[int] = []
    for first, last in pairwise(edges.tolist()):
        step_part = curve.values[first:last]
        if np.isnan(step_part).all():
            kept_indices.append(first)
            continue
        kept_indices += sorted(
            {first + int(np.nanargmin(step_part)), first + int(np.nanargmax(step_part))}
        )
    index = np.array(kept_indices)
    return Curve(curve.steps[index], curve.times[index], curve.values[index])


def all_charts(runs: Sequence[RunFolder]) -> list[dict[str, Any]]:
    """Return all charts of the page, in order: metrics first, then throughput and the time of a step by part."""
    all_charts = [
        _metric_chart(metric_name, runs) for metric_name in _metric_names(runs)
    ]
    has_several_runs = len(runs) > 1
    throughput = []
    for run in runs:
        for rank_log in main_logs(run):
            throughput.append(_throughput_trace(run, rank_log, has_several_runs))
    all_charts.append(_time_chart("throughput (samples/s)", throughput))
    for run in runs:
        if rank_logs := main_logs(run):
            title = "time of a step by part (ms)"
            if has_several_runs:
                title += f": {run.name}"
            chart = _time_chart(title, _step_parts(run, rank_logs))
            all_charts.append({**chart, "stacked": True, "run": run.name})
    return [
        chart for chart in all_charts if any(trace["y"] for trace in chart["traces"])
    ]


def main_logs(run: RunFolder) -> list[LoggedRank]:
    """Return the logs of rank 0 that have steps, one for each start of the program."""
    return [
        rank_log for rank_log in run.ranks if rank_log.rank == 0 and len(rank_log.steps)
    ]


def _metric_names(runs: Sequence[RunFolder]) -> list[str]:
    metric_names = dict.fromkeys(
        metric_name for run in runs for metric_name in run.curves
    )
    first = ("loss", "eval_loss", "learning_rate", "grad_norm")
    ordered = [metric_name for metric_name in first if metric_name in metric_names] + [
        metric_name for metric_name in metric_names if metric_name not in first
    ]
    plain = [
        metric_name
        for metric_name in ordered
        if metric_name in _RATES
        or (metric_name != "epoch" and not metric_name.endswith(_SECONDS))
    ]
    return [
        metric_name
        for metric_name in plain
        if any(
            len(run.curves[metric_name].values) > 1
            for run in runs
            if metric_name in run.curves
        )
    ]


def _metric_chart(metric_name: str, runs: Sequence[RunFolder]) -> dict[str, Any]:
    traces = []
    for run in runs:
        if metric_name in run.curves:
            curve = thin_curve(run.curves[metric_name])
            minutes = (curve.times - run.began_s) / 60
            traces.append(
                _chart_trace(
                    run.name, minutes, curve.values, steps=curve.steps.tolist()
                )
            )
    return {"title": metric_name, "traces": traces, "metric": True}


def _time_chart(title: str, traces: list[dict[str, Any]]) -> dict[str, Any]:
    return {"title": title, "traces": traces, "metric": False}


def _chart_trace(
    metric_name: str, minutes: NDArray[Any], values: NDArray[Any], **extra_fields: Any
) -> dict[str, Any]:
    shown = [
        None if not np.isfinite(metric_value) else float(f"{metric_value:.6g}")
        for metric_value in values.tolist()
    ]
    return {
        "name": metric_name,
        "minutes": np.round(minutes, 5).tolist(),
        "y": shown,
        **extra_fields,
    }


def _trace_label(run: RunFolder, rank_log: LoggedRank, has_several_runs: bool) -> str:
    words = [run.name] if has_several_runs else []
    words.append(f"rank {rank_log.rank}")
    began_s = rank_log.started.get("time", 0)
    if restarts := sum(
        earlier_log.started.get("time", 0) < began_s for earlier_log in main_logs(run)
    ):
        words.append(f"restart {restarts}")
    return ", ".join(words)


def _sum_buckets(
    rank_log: LoggedRank, columns: Sequence[str]
) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return times and the sums of columns over intervals of steps, with the number of steps as the last column."""
    steps = rank_log.steps
    edges = np.unique(
        np.linspace(0, len(steps), min(_BUCKETS, len(steps)) + 1).astype(int)
    )
    column_sums = [
        np.add.reduceat(steps[metric_name].astype(np.float64), edges[:-1])
        for metric_name in columns
    ]
    return steps["time"][edges[1:] - 1], np.stack(
        [*column_sums, np.diff(edges).astype(np.float64)]
    )


def _minutes_of_run(run: RunFolder, step_times: NDArray[Any]) -> NDArray[Any]:
    return (step_times - run.began_s) / 60


def _throughput_trace(
    run: RunFolder, rank_log: LoggedRank, has_several_runs: bool
) -> dict[str, Any]:
    step_times, column_sums = _sum_buckets(rank_log, [*STEP_PARTS, "samples"])
    seconds = np.maximum(column_sums[: len(STEP_PARTS)].sum(axis=0), 1e-9)
    return _chart_trace(
        _trace_label(run, rank_log, has_several_runs),
        _minutes_of_run(run, step_times),
        column_sums[len(STEP_PARTS)] / seconds,
    )


def _step_parts(
    run: RunFolder, rank_logs: Sequence[LoggedRank]
) -> list[dict[str, Any]]:
    step_sums = [_sum_buckets(rank_log, PARTS) for rank_log in rank_logs]
    gap = np.array(
        [[0.0]] * len(PARTS) + [[1.0]]
    )  # between two starts: where values are missing, stacked areas become ramps
    step_times = np.concatenate(
        [
            np.concatenate(
                [step_times[:1] - _EDGE_S, step_times, step_times[-1:] + _EDGE_S]
            )
            for step_times, _ in step_sums
        ]
    )
    column_sums = np.concatenate(
        [
            step_part
            for _, column_sums in step_sums
            for step_part in (gap, column_sums, gap)
        ],
        axis=1,
    )
    return [
        _chart_trace(
            step_part,
            _minutes_of_run(run, step_times),
            1e3 * column_sums[index] / column_sums[-1],
        )
        for index, step_part in enumerate(PARTS)
    ]


def last_values(runs: Sequence[RunFolder]) -> list[list[str]]:
    """Return a row per metric: its name, and for each run its last, lowest and highest value."""
    metric_names = dict.fromkeys(
        metric_name for run in runs for metric_name in run.curves
    )
    return [
        [metric_name, *(_last_value(run.curves.get(metric_name)) for run in runs)]
        for metric_name in metric_names
    ]


def _last_value(curve: Curve | None) -> str:
    if curve is None:
        return "—"
    if len(curve.values) == 1 or np.isnan(curve.values).all():
        return f"{curve.values[-1]:.6g}"
    return f"{curve.values[-1]:.6g} ({np.nanmin(curve.values):.6g} to {np.nanmax(curve.values):.6g})"


def time_unit(charts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
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
    if longest < 180:
        return {"name": "minutes", "per_minute": 1.0}
    return {"name": "hours", "per_minute": 1 / 60}


def duration_text(minutes: float) -> str:
    """Return a duration as seconds below a minute, else as hours, minutes and seconds."""
    seconds = minutes * 60
    if abs(seconds) < 60:
        return f"{seconds:.3g} s"
    return str(timedelta(seconds=round(seconds)))


def run_events(runs: Sequence[RunFolder]) -> list[dict[str, Any]]:
    """Return the events of all runs, with their minutes since the start of the run."""
    return [
        {
            "run": run.name,
            **logged_event,
            "minutes": round((logged_event["time"] - run.began_s) / 60, 4),
        }
        for run in runs
        for logged_event in run.events
    ]


def rank_rows(run: RunFolder) -> list[list[str]]:
    """Return a row per rank: steps, mean and 95th percentile of the step time, and the share of each part."""
    table_rows = []
    for rank in sorted({rank_log.rank for rank_log in run.ranks}):
        rank_logs = [
            rank_log.steps
            for rank_log in run.ranks
            if rank_log.rank == rank and len(rank_log.steps)
        ]
        if not rank_logs:
            continue
        steps = np.concatenate(rank_logs)
        seconds = np.sum(
            [steps[step_part].astype(np.float64) for step_part in STEP_PARTS], axis=0
        )
        total = max(
            sum(
                float(steps[step_part].astype(np.float64).sum()) for step_part in PARTS
            ),
            1e-9,
        )
        cells = [
            f"{1e3 * seconds.mean():.2f}",
            f"{1e3 * np.percentile(seconds, 95):.2f}",
        ]
        shares = [
            f"{float(steps[step_part].astype(np.float64).sum()) / total:.1%}"
            for step_part in PARTS
        ]
        table_rows.append([str(rank), str(len(steps)), *cells, *shares])
    return table_rows


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


def cause_rows(step_sums: Goodput) -> list[list[str]]:
    """Return a row per cause of the wall time: its name, time, share and meaning; causes that took no time are left out."""
    wall = max(step_sums.wall_s, 1e-9)
    return [
        [cause, duration_text(seconds / 60), f"{seconds / wall:.1%}", _MEANINGS[cause]]
        for cause, seconds in step_sums.seconds.items()
        if seconds > 0 or cause == "useful"
    ]


def difference_rows(runs: Sequence[RunFolder]) -> list[list[str]]:
    """Return a row per setting or fact that differs between runs: its name and its value in each."""
    tables = [
        {
            **{
                setting_name: setting_value
                for setting_name, (setting_value, _) in run.settings.items()
            },
            **run.environment,
        }
        for run in runs
    ]
    metric_names = dict.fromkeys(
        metric_name for table in tables for metric_name in table
    )
    table_rows = [
        [metric_name, *(table.get(metric_name, "—") for table in tables)]
        for metric_name in metric_names
    ]
    return [row for row in table_rows if len(set(row[1:])) > 1]
