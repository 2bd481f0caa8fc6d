"""What the extension offers: placing and loading models larger than a device, and estimates of their memory."""

from __future__ import annotations

from typing import Final

from hasten.extension import Extension

extension: Final = Extension(
    name="bigmodel",
    summary="models larger than the device: placement, streaming from host and disk, loading, estimates",
    commands={"estimate-memory": "hasten.extensions.bigmodel.command:main"},
    command_help={
        "estimate-memory": "estimate the memory a model needs, before it is loaded"
    },
    public_names={
        "load_checkpoint_and_dispatch": "hasten.extensions.bigmodel.load:load_checkpoint_and_dispatch"
    },
)
