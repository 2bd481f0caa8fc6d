"""Declaration of copies in memory."""

from __future__ import annotations

from typing import Final

from hasten.extension import Extension

extension: Final = Extension(
    name="memory_copies",
    summary="the newest state of a run in the memory of its machines",
    run_parts={
        "checkpoint_in_memory": "hasten.extensions.memory_copies.part:MemoryCopies"
    },
    run_part_settings={"checkpoint_in_memory": "checkpoint_in_memory"},
)
