"""Data of the report page: charts reduced to a few thousand points, tables of settings and differences."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
from itertools import chain, pairwise
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
    charts = [_metric_chart(metric_name, runs) for metric_name in _metric_names(runs)]
    has_several_runs = len(runs) > 1
    throughput = []
    for run in runs:
        for rank_log in main_logs(run):
            throughput.append(_throughput_trace(run, rank_log, has_several_runs))
    charts.append(_time_chart("throughput (samples/s)", throughput))
    for run in runs:
        if rank_logs := main_logs(run):
            title = "time of a step by part (ms)"
            if has_several_runs:
                title += f": {run.name}"
            chart = _time_chart(title, _step_parts(run, rank_logs))
            charts.append({**chart, "stacked": True, "run": run.name})
    return list(filter(_has_points, charts))


def _has_points(chart: Mapping[str, Any]) -> bool:
    return any(trace["y"] for trace in chart["traces"])


def main_logs(run: RunFolder) -> list[LoggedRank]:
    """Return the logs of rank 0 that have steps, one for each start of the program."""
    return _rank_logs(run, 0)


def _rank_logs(run: RunFolder, rank: int) -> list[LoggedRank]:
    return [log for log in run.ranks if log.rank == rank and len(log.steps)]


def _union_names(tables: Iterable[Iterable[str]]) -> list[str]:
    return list(dict.fromkeys(chain.from_iterable(tables)))


def _metric_names(runs: Sequence[RunFolder]) -> list[str]:
    """Return the names of metrics with several points, the most important first."""
    drawn_names = set()
    for run in runs:
        for metric_name, curve in run.curves.items():
            is_time = metric_name == "epoch" or metric_name.endswith(_SECONDS)
            if len(curve.values) > 1 and (metric_name in _RATES or not is_time):
                drawn_names.add(metric_name)
    first_names = ("loss", "eval_loss", "learning_rate", "grad_norm")
    ordered_names = _union_names([first_names, *(run.curves for run in runs)])
    return list(filter(drawn_names.__contains__, ordered_names))


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
    shown_values = []
    for metric_value in values.tolist():
        is_finite = np.isfinite(metric_value)
        shown_values.append(float(f"{metric_value:.6g}") if is_finite else None)
    return {
        "name": metric_name,
        "minutes": np.round(minutes, 5).tolist(),
        "y": shown_values,
        **extra_fields,
    }


def _trace_label(run: RunFolder, rank_log: LoggedRank, has_several_runs: bool) -> str:
    words = [run.name] if has_several_runs else []
    words.append(f"rank {rank_log.rank}")
    began_s = rank_log.started.get("time", 0)
    num_restarts = 0
    for earlier_log in main_logs(run):
        num_restarts += earlier_log.started.get("time", 0) < began_s
    if num_restarts:
        words.append(f"restart {num_restarts}")
    return ", ".join(words)


def _sum_buckets(
    rank_log: LoggedRank, columns: Sequence[str]
) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return times and the sums of columns over intervals of steps, with the number of steps as the last column."""
    steps = rank_log.steps
    edges = np.unique(
        np.linspace(0, len(steps), min(_BUCKETS, len(steps)) + 1).astype(int)
    )
    column_sums = np.add.reduceat(_stack_columns(steps, columns), edges[:-1], axis=1)
    num_steps = np.diff(edges).astype(np.float64)
    return steps["time"][edges[1:] - 1], np.vstack([column_sums, num_steps])


def _stack_columns(steps: NDArray[Any], names: Sequence[str]) -> NDArray[Any]:
    """Return the columns of a table of steps as the rows of a matrix."""
    return np.stack([steps[name].astype(np.float64) for name in names])


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
    # between two starts: where values are missing, stacked areas become ramps
    gap = np.array([[0.0]] * len(PARTS) + [[1.0]])
    all_times: list[NDArray[Any]] = []
    all_sums: list[NDArray[Any]] = []
    for rank_log in rank_logs:
        step_times, column_sums = _sum_buckets(rank_log, PARTS)
        all_times += [step_times[:1] - _EDGE_S, step_times, step_times[-1:] + _EDGE_S]
        all_sums += [gap, column_sums, gap]
    minutes = _minutes_of_run(run, np.concatenate(all_times))
    *part_sums, num_steps = np.concatenate(all_sums, axis=1)
    traces = []
    for step_part, part_sum in zip(PARTS, part_sums, strict=True):
        traces.append(_chart_trace(step_part, minutes, 1e3 * part_sum / num_steps))
    return traces


def last_values(runs: Sequence[RunFolder]) -> list[list[str]]:
    """Return a row per metric: its name, and for each run its last, lowest and highest value."""
    table_rows = []
    for metric_name in _union_names(run.curves for run in runs):
        curves = [run.curves.get(metric_name) for run in runs]
        table_rows.append([metric_name, *map(_last_value, curves)])
    return table_rows


def _last_value(curve: Curve | None) -> str:
    if curve is None:
        return "—"
    if len(curve.values) == 1 or np.isnan(curve.values).all():
        return f"{curve.values[-1]:.6g}"
    return f"{curve.values[-1]:.6g} ({np.nanmin(curve.values):.6g} to {np.nanmax(curve.values):.6g})"


def time_unit(charts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the unit of the time axes, by the longest one: seconds, minutes or hours, and the units per minute."""
    longest = 0.0
    for chart in charts:
        for trace in chart["traces"]:
            longest = max(longest, *trace["minutes"], 0.0)
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
    timed_events = []
    for run in runs:
        for event in run.events:
            minutes = round((event["time"] - run.began_s) / 60, 4)
            timed_events.append({"run": run.name, **event, "minutes": minutes})
    return timed_events


def rank_rows(run: RunFolder) -> list[list[str]]:
    """Return a row per rank: steps, mean and 95th percentile of the step time, and the share of each part."""
    table_rows = []
    for rank in sorted({rank_log.rank for rank_log in run.ranks}):
        rank_steps = [rank_log.steps for rank_log in _rank_logs(run, rank)]
        if not rank_steps:
            continue
        steps = np.concatenate(rank_steps)
        seconds = _stack_columns(steps, STEP_PARTS).sum(axis=0)
        part_sums = _stack_columns(steps, PARTS).sum(axis=1)
        shares = part_sums / max(part_sums.sum(), 1e-9)
        cells = [
            f"{1e3 * seconds.mean():.2f}",
            f"{1e3 * np.percentile(seconds, 95):.2f}",
            *map("{:.1%}".format, shares),
        ]
        table_rows.append([str(rank), str(len(steps)), *cells])
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
    table_rows = []
    for cause, seconds in step_sums.seconds.items():
        if seconds > 0 or cause == "useful":
            share = f"{seconds / wall:.1%}"
            duration = duration_text(seconds / 60)
            table_rows.append([cause, duration, share, _MEANINGS[cause]])
    return table_rows


def difference_rows(runs: Sequence[RunFolder]) -> list[list[str]]:
    """Return a row per setting or fact that differs between runs: its name and its value in each."""
    tables = []
    for run in runs:
        table = {name: setting for name, (setting, _) in run.settings.items()}
        tables.append(table | run.environment)
    table_rows = []
    for name in _union_names(tables):
        cells = [table.get(name, "—") for table in tables]
        if len(set(cells)) > 1:
            table_rows.append([name, *cells])
    return table_rows
