"""Declaration of the commands that read checkpoints."""

from __future__ import annotations

from typing import Final

from hasten.extension import Extension

extension: Final = Extension(
    name="checkpoint_tools",
    summary="list, verify, compare, merge and convert checkpoints",
    commands={
        "ckpt": "hasten.extensions.checkpoint_tools.command:main",
    },
    command_help={
        "ckpt": "list, verify, compare and convert checkpoints",
    },
)
