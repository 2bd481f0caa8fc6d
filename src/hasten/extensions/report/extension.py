"""Reports of runs."""

from __future__ import annotations

from types import MappingProxyType

from hasten.extension import Extension

extension = Extension(
    name="report",
    summary="reports of runs",
    commands=MappingProxyType(
        {
            "report": "hasten.extensions.report.command:main",
        }
    ),
    command_help=MappingProxyType(
        {
            "report": "write a report of one or several runs: curves, times, events, settings",
        }
    ),
)
