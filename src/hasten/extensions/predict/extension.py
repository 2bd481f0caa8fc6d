"""Batch inference on files."""

from __future__ import annotations

from typing import Final

from hasten.extension import Extension

extension: Final = Extension(
    name="predict",
    summary="batch inference on files",
    commands={
        "predict": "hasten.extensions.predict.command:main",
    },
    command_help={
        "predict": "run a model over all rows of a file, on all processes",
    },
)
