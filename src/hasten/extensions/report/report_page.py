"""HTML page of `hasten report`: one file with its data and drawing code, which needs no network."""

from __future__ import annotations

import re
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

import msgspec

from hasten.extensions.report import report_data
from hasten.extensions.report.run_folder import RunFolder
from hasten.tracking import goodput
from hasten.tracking.run_log import PARTS


def page(runs: Sequence[RunFolder]) -> str:
    """Return the HTML about these runs, whose charts are drawn as SVG."""
    charts = report_data.charts(runs)
    content = {
        "charts": charts,
        "events": report_data.events(runs),
        "unit": report_data.unit(charts),
        "colours": report_data.COLOURS,
    }
    parts = {
        "__TITLE__": escape(f"hasten report: {', '.join(run.name for run in runs)}"),
        "__TABLES__": "\n".join(_tables(runs)),
        "__DATA__": script_json(content),
        "__DRAWING__": _file("report_svg.js"),
    }
    template = _file("report_page.html")
    return re.sub("|".join(parts), lambda match: parts[match[0]], template)


def script_json(content: Any) -> str:  # Any: JSON values
    """Return JSON that is safe inside a script element: it neither ends the element nor starts a comment."""
    text = msgspec.json.encode(content).decode()
    return re.sub("[<>&\u2028\u2029]", lambda match: f"\\u{ord(match[0]):04x}", text)


def _file(name: str) -> str:
    return Path(__file__).with_name(name).read_text(encoding="utf-8")


def _tables(runs: Sequence[RunFolder]) -> list[str]:
    tables: list[str] = []
    if len(runs) > 1:
        heading = ["setting or fact", *(run.name for run in runs)]
        tables.append(_table("What differs", heading, report_data.differences(runs)))
    if rows := report_data.last_values(runs):
        tables.append(
            _table(
                "Last values (lowest to highest)",
                ["metric", *(run.name for run in runs)],
                rows,
            )
        )
    for run in runs:
        of_run = f": {run.name}" if len(runs) > 1 else ""
        if (found := goodput.of_run(run.ranks)) is not None:
            title = f"Goodput{of_run}: {found.ratio:.1%} of {report_data.duration(found.wall_s / 60)}"
            tables.append(
                _table(title, ["cause", "time", "share", ""], report_data.causes(found))
            )
        if rows := report_data.spread(run):
            heading = ["rank", "updates", "step (ms)", "95 % below", *PARTS]
            tables.append(_table(f"Ranks{of_run}", heading, rows))
        events = [
            [
                report_data.duration(event["minutes"]),
                str(event["event"]),
                _details(event),
            ]
            for event in report_data.events([run])
        ]
        if events:
            tables.append(
                _folded(
                    f"Events{of_run} ({len(events)})",
                    ["after", "event", ""],
                    events[:500],
                )
            )
        settings = [
            [name, value, source]
            for name, (value, source) in sorted(run.settings.items())
        ]
        if settings:
            tables.append(
                _folded(f"Settings{of_run}", ["setting", "value", "from"], settings)
            )
        if run.environment:
            rows = [[name, value] for name, value in run.environment.items()]
            tables.append(_folded(f"Environment{of_run}", ["", ""], rows))
    return tables


def _details(event: dict[str, object]) -> str:
    return ", ".join(
        f"{event[key]}{' s' if key == 'seconds' else ''}"
        for key in ("words", "seconds", "error")
        if key in event
    )


def _table(title: str, heading: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return f"<h2>{escape(title)}</h2>{_cells(heading, rows)}"


def _folded(title: str, heading: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return (
        f"<details><summary>{escape(title)}</summary>{_cells(heading, rows)}</details>"
    )


def _cells(heading: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = ["".join(f"<td>{escape(cell)}</td>" for cell in row) for row in rows]
    body = "".join(f"<tr>{line}</tr>" for line in lines)
    head = "".join(f"<th>{escape(cell)}</th>" for cell in heading)
    return f'<div class="wide"><table><tr>{head}</tr>{body}</table></div>'
