"""fp8 through NVIDIA Transformer Engine, as functions on a model."""

from __future__ import annotations

from torch import nn

from accelerate import notyet

_PART = "fp8 with Transformer Engine by hand (Accelerator(mixed_precision='fp8') does it in prepare())"
apply_fp8_autowrap = notyet.function("utils.apply_fp8_autowrap", _PART)
contextual_fp8_autocast = notyet.function("utils.contextual_fp8_autocast", _PART)
convert_model = notyet.function("utils.convert_model", _PART)


def has_transformer_engine_layers(model: nn.Module) -> bool:
    """Whether a part of the model is Transformer Engine's."""
    return any(type(part).__module__.startswith("transformer_engine") for part in model.modules())
