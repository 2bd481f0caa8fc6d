"""What the extension offers: modes of `offload=`."""

from __future__ import annotations

from typing import Final

from hasten.extension import Extension

extension: Final = Extension(
    name="offload",
    summary="training state in host memory, streamed to the device for its use",
    offload_modes={
        "optimizer": "hasten.extensions.offload.attach:OPTIMIZER_STATE",
        "parameters": "hasten.extensions.offload.attach:PARAMETERS",
        "all": "hasten.extensions.offload.attach:PARAMETERS",
    },
)
