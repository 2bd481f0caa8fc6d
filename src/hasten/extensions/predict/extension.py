"""Batch inference on files."""

from __future__ import annotations

from types import MappingProxyType

from hasten.extension import Extension

extension = Extension(
    name="predict",
    summary="batch inference on files",
    commands=MappingProxyType(
        {
            "predict": "hasten.extensions.predict.command:main",
        }
    ),
    command_help=MappingProxyType(
        {
            "predict": "run a model over all rows of a file, on all processes",
        }
    ),
)
