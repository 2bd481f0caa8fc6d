"""Reports of runs."""

from __future__ import annotations

from typing import Final

from hasten.extension import Extension

extension: Final = Extension(
    name="report",
    summary="reports of runs",
    commands={
        "report": "hasten.extensions.report.command:main",
    },
    command_help={
        "report": "write a report of one or several runs: curves, times, events, settings",
    },
)
