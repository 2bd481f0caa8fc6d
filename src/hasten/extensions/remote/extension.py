"""Declaration of checkpoints at URLs."""

from __future__ import annotations

from typing import Final

from hasten.extension import Extension

extension: Final = Extension(
    name="remote",
    summary="checkpoints at URLs of object stores and other file systems",
    stores={"url": "hasten.extensions.remote.remote_store:RemoteStore"},
)
