"""What the extension offers: a launch target with its settings."""

from __future__ import annotations

from typing import Final

from hasten.extension import Extension

extension: Final = Extension(
    name="ray",
    summary="Ray Train: scripts on the workers of a cluster, and their metrics and checkpoints",
    launch_targets={"ray": "hasten.extensions.ray.launch_target:TARGET"},
    settings={"launch.ray": "hasten.extensions.ray.settings:RaySettings"},
)
