"""Ranks watched from threads beside their training: reports of stalls, and `hasten top`."""

from __future__ import annotations

from typing import Final

from hasten.extension import SEVERAL_RANKS, Extension

extension: Final = Extension(
    name="watch",
    summary="reports of ranks that wait for each other, and a live table of a job's ranks",
    run_parts={
        "stalls": "hasten.extensions.watch.part:StallWatch",
        "status": "hasten.extensions.watch.status_server:StatusPart",
    },
    run_part_settings={"stalls": SEVERAL_RANKS, "status": "$HASTEN_CONFIG"},
    commands={
        "top": "hasten.extensions.watch.command:main",
    },
    command_help={
        "top": "show a live table of a running job: ranks, steps, waits, memory, stacks",
    },
)
