"""Charts of `hasten report` as one PNG picture, for environments without a browser."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any, Final

from hasten.optional import need
from hasten.tools.report import report_data
from hasten.tracking.run_folder import RunFolder

_COLUMNS: Final = 2
_MARKED: Final = ("saved", "loaded", "restarted", "skipped")

# Any in this file: charts are JSON values, axes are matplotlib's.


def picture(runs: Sequence[RunFolder]) -> bytes:
    """Return a PNG with every chart about these runs.

    Raises: MissingPackageError when matplotlib is not installed.
    """
    figures = need("matplotlib.figure", why="hasten report as a PNG picture")
    charts = report_data.charts(runs)
    events = report_data.events(runs)
    unit = report_data.unit(charts)
    rows = max(-(-len(charts) // _COLUMNS), 1)
    figure = figures.Figure(figsize=(6.4 * _COLUMNS, 3.2 * rows), layout="constrained", dpi=100)
    figure.suptitle(f"hasten report: {', '.join(run.name for run in runs)}", fontsize=12, x=0.01, ha="left")
    places = figure.subplots(rows, _COLUMNS, squeeze=False).flat
    for place, chart in zip(places, [*charts, *[None] * (rows * _COLUMNS - len(charts))], strict=True):
        if chart is None:
            place.set_axis_off()
        else:
            _draw(place, chart, events, unit)
    content = io.BytesIO()
    figure.savefig(content, format="png")
    return content.getvalue()


def _lonely(values: Sequence[float]) -> bool:
    """Return whether a point is isolated between two gaps, where no line would show it."""
    missing = [True, *(value != value for value in values), True]
    return any(missing[at - 1] and not missing[at] and missing[at + 1] for at in range(1, len(values) + 1))


def _draw(axes: Any, chart: dict[str, Any], events: Sequence[dict[str, Any]], unit: dict[str, Any]) -> None:
    traces = chart["traces"]
    scale = unit["per_minute"]
    across = [trace["steps"] if chart["metric"] else [scale * at for at in trace["minutes"]] for trace in traces]
    values = [[float("nan") if y is None else y for y in trace["y"]] for trace in traces]
    names = [trace["name"] for trace in traces]
    colours = [report_data.COLOURS[number % len(report_data.COLOURS)] for number in range(len(traces))]
    if chart.get("stacked"):
        axes.stackplot(across[0], *[[0.0 if y != y else y for y in ys] for ys in values], labels=names, colors=colours)
    else:
        for name, xs, ys, colour in zip(names, across, values, colours, strict=True):
            axes.plot(xs, ys, label=name, color=colour, linewidth=1.2, marker="." if _lonely(ys) else "")
    axes.set_title(chart["title"], fontsize=10)
    axes.set_xlabel("step" if chart["metric"] else unit["name"], fontsize=8)
    axes.tick_params(labelsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    if len(traces) > 1:
        axes.legend(fontsize=7, frameon=False)
    if not chart["metric"]:
        axes.set_xlim(left=0)
        for event in events:
            if event["event"] in _MARKED and chart.get("run", event["run"]) == event["run"]:
                axes.axvline(scale * event["minutes"], color="#546e7a", linewidth=0.7, linestyle=":")
