"""The page of `hasten report`: one HTML file that holds its data and its plotting library, and needs no network."""

from __future__ import annotations

import re
from collections.abc import Sequence
from html import escape
from pathlib import Path

import msgspec

from hasten.cli import report_data
from hasten.optional import need
from hasten.tracking.run_folder import RunFolder
from hasten.tracking.run_log import PARTS


def page(runs: Sequence[RunFolder], reload_s: float = 0.0) -> str:
    """The HTML about these runs; with `reload_s` the browser reads it again after as many seconds.

    Raises: MissingPackageError when the plotting library is not installed.
    """
    library = Path(need("plotly", ">=5.24", why="the charts of hasten report").__file__).parent
    template = Path(__file__).with_name("report_page.html").read_text(encoding="utf-8")
    title = f"hasten report: {', '.join(run.name for run in runs)}"
    content = {"charts": report_data.charts(runs), "events": report_data.events(runs), "reload_s": reload_s}
    data = msgspec.json.encode(content).decode().replace("</", "<\\/")
    parts = {
        "__TITLE__": escape(title),
        "__TABLES__": "\n".join(_tables(runs)),
        "__DATA__": data,
        "__PLOTLY__": (library / "package_data" / "plotly.min.js").read_text(encoding="utf-8"),
    }
    return re.sub("|".join(parts), lambda found: parts[found[0]], template)


def _tables(runs: Sequence[RunFolder]) -> list[str]:
    found: list[str] = []
    if len(runs) > 1:
        heading = ["setting or fact", *(run.name for run in runs)]
        found.append(_table("What differs", heading, report_data.differences(runs)))
    if rows := report_data.last_values(runs):
        found.append(_table("Last values (lowest to highest)", ["metric", *(run.name for run in runs)], rows))
    for run in runs:
        of_run = f": {run.name}" if len(runs) > 1 else ""
        if rows := report_data.spread(run):
            heading = ["rank", "updates", "step (ms)", "95 % below", *PARTS]
            found.append(_table(f"Ranks{of_run}", heading, rows))
        events = [
            [f"{event['minutes']:.2f}", str(event["event"]), _details(event)] for event in report_data.events([run])
        ]
        if events:
            found.append(_folded(f"Events{of_run} ({len(events)})", ["minutes", "event", ""], events[:500]))
        settings = [[name, value, source] for name, (value, source) in sorted(run.settings.items())]
        if settings:
            found.append(_folded(f"Settings{of_run}", ["setting", "value", "from"], settings))
        if run.environment:
            rows = [[name, value] for name, value in run.environment.items()]
            found.append(_folded(f"Environment{of_run}", ["", ""], rows))
    return found


def _details(event: dict[str, object]) -> str:
    return ", ".join(f"{event[key]}{' s' if key == 'seconds' else ''}" for key in ("seconds", "error") if key in event)


def _table(title: str, heading: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return f"<h2>{escape(title)}</h2>{_cells(heading, rows)}"


def _folded(title: str, heading: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return f"<details><summary>{escape(title)}</summary>{_cells(heading, rows)}</details>"


def _cells(heading: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = ["".join(f"<td>{escape(cell)}</td>" for cell in row) for row in rows]
    body = "".join(f"<tr>{line}</tr>" for line in lines)
    head = "".join(f"<th>{escape(cell)}</th>" for cell in heading)
    return f"<table><tr>{head}</tr>{body}</table>"
