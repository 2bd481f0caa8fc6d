"""Declaration of the estimate."""

from __future__ import annotations

from typing import Final

from hasten.extension import Extension

extension: Final = Extension(
    name="estimate",
    summary="estimate the memory a model needs",
    commands={"estimate-memory": "hasten.extensions.estimate.command:main"},
    command_help={"estimate-memory": "estimate the memory a model needs, before it is loaded"},
)
