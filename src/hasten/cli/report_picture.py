"""The charts of `hasten report` as one PNG picture, for places where no page can be opened."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any, Final

from hasten.cli import report_data
from hasten.optional import need
from hasten.tracking.run_folder import RunFolder

_COLUMNS: Final = 2
_COLOURS: Final = ("#1769aa", "#d1495b", "#2e8b57", "#8d5fd3", "#e08e0b", "#00838f", "#795548", "#546e7a")
_MARKED: Final = ("saved", "loaded", "restarted", "skipped")

# Any in this file: charts are JSON values, axes are matplotlib's.


def picture(runs: Sequence[RunFolder]) -> bytes:
    """The PNG of every chart about these runs.

    Raises: MissingPackageError when matplotlib is not installed.
    """
    figures = need("matplotlib.figure", why="hasten report as a PNG picture")
    charts = report_data.charts(runs)
    events = report_data.events(runs)
    rows = max(-(-len(charts) // _COLUMNS), 1)
    figure = figures.Figure(figsize=(6.4 * _COLUMNS, 3.2 * rows), layout="constrained", dpi=100)
    figure.suptitle(f"hasten report: {', '.join(run.name for run in runs)}", fontsize=12, x=0.01, ha="left")
    places = figure.subplots(rows, _COLUMNS, squeeze=False).flat
    for place, chart in zip(places, [*charts, *[None] * (rows * _COLUMNS - len(charts))], strict=True):
        if chart is None:
            place.set_axis_off()
        else:
            _draw(place, chart, events)
    content = io.BytesIO()
    figure.savefig(content, format="png")
    return content.getvalue()


def _draw(axes: Any, chart: dict[str, Any], events: Sequence[dict[str, Any]]) -> None:
    axis = "steps" if chart["metric"] else "minutes"
    traces = chart["traces"]
    values = [[float("nan") if y is None else y for y in trace["y"]] for trace in traces]
    names = [trace["name"] for trace in traces]
    colours = [_COLOURS[number % len(_COLOURS)] for number in range(len(traces))]
    if chart.get("stacked"):
        axes.stackplot(
            traces[0][axis], *[[0.0 if y != y else y for y in ys] for ys in values], labels=names, colors=colours
        )
    else:
        for trace, ys, colour in zip(traces, values, colours, strict=True):
            axes.plot(
                trace[axis], ys, label=trace["name"], color=colour, linewidth=1.2, marker="o" if len(ys) == 1 else ""
            )
    axes.set_title(chart["title"], fontsize=10)
    axes.set_xlabel("step" if chart["metric"] else "minutes", fontsize=8)
    axes.tick_params(labelsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    if len(traces) > 1:
        axes.legend(fontsize=7, frameon=False)
    if not chart["metric"]:
        for event in events:
            if event["event"] in _MARKED and chart.get("run", event["run"]) == event["run"]:
                axes.axvline(event["minutes"], color="#546e7a", linewidth=0.7, linestyle=":")
