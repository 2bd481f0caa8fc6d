"""The live table of a job's ranks."""

from __future__ import annotations

from typing import Final

from hasten.extension import Extension

extension: Final = Extension(
    name="top",
    summary="live table of the ranks of a job",
    commands={
        "top": "hasten.extensions.top.command:main",
        "attach": "hasten.extensions.top.command:main",
    },
    run_parts={"status": "hasten.extensions.top.status_server:StatusPart"},
    run_part_settings={"status": "$HASTEN_CONFIG"},
    command_help={
        "top": "show a live table of a running job: ranks, steps, waits, memory, stacks",
        "attach": "alias of top",
    },
)
