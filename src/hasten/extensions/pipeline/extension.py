"""What the extension offers: the axis pp of the mesh."""

from __future__ import annotations

from typing import Final

from hasten.extension import Extension

extension: Final = Extension(
    name="pipeline",
    summary="pipeline parallelism: the layers of a model divided over processes",
    mesh_axes={"pp": "hasten.extensions.pipeline.choice:STAGES"},
    public_names={
        "prepare_pipeline": "hasten.extensions.pipeline.inference:prepare_pipeline",
    },
)
