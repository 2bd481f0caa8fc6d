"""What the extension offers: `Accelerator.capture_step()`."""

from __future__ import annotations

from typing import Final

from hasten.extension import Extension

extension: Final = Extension(
    name="capture",
    summary="a training step as one CUDA graph",
    step_wrappers={
        "capture_step": "hasten.extensions.capture.captured_step:capture_step"
    },
)
