"""The settings that hold, as a table of value, source and what was replaced, or as data."""

from __future__ import annotations

from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from hasten.config.decode import encode
from hasten.config.masking import masked_value
from hasten.config.resolve import Resolved
from hasten.config.schema import SETTABLE, FieldInfo
from hasten.config.source import shown


def value_of(resolved: Resolved, info: FieldInfo) -> Any:
    """Return the value that holds for a setting."""
    value: Any = resolved.config
    for name in info.path:
        value = getattr(value, name)
    return value


def explain(resolved: Resolved, *, changed: bool = False) -> list[dict[str, Any]]:
    """Return one row per setting: name, value, source, and the weaker sources it replaced."""
    rows = []
    for info in SETTABLE:
        value, source = value_of(resolved, info), resolved.source(info.path)
        if changed and source.kind == "default" and value == info.default:
            continue
        replaced = [
            {"value": masked_value(info.path[-1], encode(entry.value)), "source": str(entry.source)}
            for entry in resolved.shadowed.get(info.path, ())
        ]
        rows.append(
            {
                "name": info.name,
                "value": masked_value(info.path[-1], encode(value)),
                "source": str(source),
                "replaced": replaced,
            }
        )
    return rows


def table(resolved: Resolved, *, changed: bool = False, console: Console | None = None) -> None:
    """Print one line per setting with its value, its source and what it replaced; defaults are dim."""
    console = console or Console(highlight=False)
    if not console.is_terminal:
        console.width = 240  # a file or pipe has no edge to break lines at
    rows = explain(resolved, changed=changed)
    grid = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("setting", "value", "source", "instead of"):
        if heading != "instead of" or any(row["replaced"] for row in rows):
            grid.add_column(heading, overflow="fold", no_wrap=heading == "setting")
    section = ""
    for row in rows:
        if (group := row["name"].rpartition(".")[0].split(".")[0]) != section:
            grid.add_section()
            section = group
        style = "dim" if row["source"] == "default" else "bold"
        replaced = ", ".join(f"{_spelled(item['value'])} ({item['source']})" for item in row["replaced"])
        cells = (row["name"], _spelled(row["value"]), row["source"], replaced)[: len(grid.columns)]
        grid.add_row(*(Text(cell, style=style) for cell in cells))
    console.print(grid)


def _spelled(value: Any) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        return ", ".join(_spelled(item) for item in value) or "[]"
    return shown(value)
