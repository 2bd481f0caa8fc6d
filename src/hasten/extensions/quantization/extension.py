"""What the extension offers: functions that quantize weights."""

from __future__ import annotations

from typing import Final

from hasten.extension import Extension

extension: Final = Extension(
    name="quantization",
    summary="weights in four or eight bits, by torchao or bitsandbytes",
    public_names={
        "dequantize_weights": "hasten.extensions.quantization.quantize:dequantize_weights",
        "quantize_weights": "hasten.extensions.quantization.quantize:quantize_weights",
    },
)
