"""Declaration of uploads to the Hub."""

from __future__ import annotations

from typing import Final

from hasten.extension import Extension

extension: Final = Extension(
    name="hub",
    summary="uploads of models to the Hub, and downloads from it",
    uploads={"hub": "hasten.extensions.hub.publishing:Publishing"},
)
