"""HTML page of `hasten report`: one file with its data and drawing code, which needs no network."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from typing import Any

import msgspec

from hasten.extensions.report import report_data
from hasten.extensions.report.run_folder import RunFolder
from hasten.tracking import goodput
from hasten.tracking.run_log import PARTS


def report_page(runs: Sequence[RunFolder]) -> str:
    """Return the HTML about these runs, whose charts are drawn as SVG."""
    charts = report_data.all_charts(runs)
    content = {
        "charts": charts,
        "events": report_data.run_events(runs),
        "unit": report_data.time_unit(charts),
        "colours": report_data.COLOURS,
    }
    run_names = ", ".join(run.name for run in runs)
    placeholders = {
        "__TITLE__": escape(f"hasten report: {run_names}"),
        "__TABLES__": "\n".join(_run_tables(runs)),
        "__DATA__": script_json(content),
        "__DRAWING__": _read_file("report_svg.js"),
    }
    template = _read_file("report_page.html")
    return re.sub(
        "|".join(placeholders), lambda match: placeholders[match[0]], template
    )


def script_json(content: Any) -> str:  # Any: JSON values
    """Return JSON that is safe inside a script element: it neither ends the element nor starts a comment."""
    text = msgspec.json.encode(content).decode()
    return re.sub("[<>&\u2028\u2029]", lambda match: f"\\u{ord(match[0]):04x}", text)


def _read_file(setting_name: str) -> str:
    return Path(__file__).with_name(setting_name).read_text(encoding="utf-8")


def _run_tables(runs: Sequence[RunFolder]) -> list[str]:
    tables: list[str] = []
    run_names = [run.name for run in runs]
    if len(runs) > 1:
        table_heading = ["setting or fact", *run_names]
        tables.append(
            _table_html(
                "What differs", table_heading, report_data.difference_rows(runs)
            )
        )
    if table_rows := report_data.last_values(runs):
        tables.append(
            _table_html(
                "Last values (lowest to highest)",
                ["metric", *run_names],
                table_rows,
            )
        )
    for run in runs:
        of_run = f": {run.name}" if len(runs) > 1 else ""
        if (run_goodput := goodput.goodput_of_run(run.ranks)) is not None:
            table_title = f"Goodput{of_run}: {run_goodput.ratio:.1%} of {report_data.duration_text(run_goodput.wall_s / 60)}"
            tables.append(
                _table_html(
                    table_title,
                    ["cause", "time", "share", ""],
                    report_data.cause_rows(run_goodput),
                )
            )
        if table_rows := report_data.rank_rows(run):
            table_heading = ["rank", "updates", "step (ms)", "95 % below", *PARTS]
            tables.append(_table_html(f"Ranks{of_run}", table_heading, table_rows))
        events = []
        for event in report_data.run_events([run]):
            duration = report_data.duration_text(event["minutes"])
            events.append([duration, str(event["event"]), _event_details(event)])
        if events:
            tables.append(
                _folded_html(
                    f"Events{of_run} ({len(events)})",
                    ["after", "event", ""],
                    events[:500],
                )
            )
        settings = []
        for setting_name, (value, source) in sorted(run.settings.items()):
            settings.append([setting_name, value, source])
        if settings:
            tables.append(
                _folded_html(
                    f"Settings{of_run}", ["setting", "value", "from"], settings
                )
            )
        if run.environment:
            table_rows = list(map(list, run.environment.items()))
            tables.append(_folded_html(f"Environment{of_run}", ["", ""], table_rows))
    return tables


def _event_details(event: dict[str, object]) -> str:
    details = []
    for key, unit in (("words", ""), ("seconds", " s"), ("error", "")):
        if key in event:
            details.append(f"{event[key]}{unit}")
    return ", ".join(details)


def _table_html(
    table_title: str, table_heading: Sequence[str], table_rows: Sequence[Sequence[str]]
) -> str:
    return f"<h2>{escape(table_title)}</h2>{_cells_html(table_heading, table_rows)}"


def _folded_html(
    table_title: str, table_heading: Sequence[str], table_rows: Sequence[Sequence[str]]
) -> str:
    return f"<details><summary>{escape(table_title)}</summary>{_cells_html(table_heading, table_rows)}</details>"


def _cells_html(
    table_heading: Sequence[str], table_rows: Sequence[Sequence[str]]
) -> str:
    lines = [_row_html("th", table_heading)]
    for table_row in table_rows:
        lines.append(_row_html("td", table_row))
    return f'<div class="wide"><table>{"".join(lines)}</table></div>'


def _row_html(tag: str, cells: Iterable[str]) -> str:
    tagged_cells = [f"<{tag}>{escape(cell)}</{tag}>" for cell in cells]
    return f"<tr>{''.join(tagged_cells)}</tr>"
