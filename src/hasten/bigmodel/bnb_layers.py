"""Linear layers of bitsandbytes in the place of torch's: weights in four or eight bits, quantized where they lie."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Final, Literal

import torch
from torch import Tensor, nn

from hasten.optional import need

BnbKind = Literal["nf4", "fp4", "llm_int8"]
BNB_KINDS: Final = ("nf4", "fp4", "llm_int8")


@dataclass(frozen=True, slots=True, kw_only=True)
class BnbSettings:
    """How bitsandbytes keeps weights."""

    kind: BnbKind = "nf4"
    compute_dtype: torch.dtype | None = None
    """What four-bit weights are multiplied in; None for the dtype they had."""
    double_quantization: bool = False
    """Whether the scales of four-bit weights are quantized as well."""
    outlier_threshold: float = 6.0
    """Inputs larger than this are multiplied in 16 bits by layers of the kind llm_int8."""


def bnb() -> Any:  # Any: bitsandbytes' own classes
    """The layers of bitsandbytes. Raises: MissingPackageError without it."""
    return need("bitsandbytes.nn", ">=0.45", why="weights in nf4, fp4 or llm_int8")


def is_quantized(tensor: Tensor) -> bool:
    """Whether bitsandbytes keeps the tensor; its scales lie beside it and do not come along when it is copied."""
    return type(tensor).__module__.partition(".")[0] == "bitsandbytes"


def replace_linears(model: nn.Module, names: Collection[str], settings: BnbSettings) -> nn.Module:
    """The model with these linear layers exchanged for ones of bitsandbytes, in place, one after another."""
    library = bnb()
    for name in names:
        owner, _, last = name.rpartition(".")
        setattr(model.get_submodule(owner), last, _converted(library, model.get_submodule(name), settings))
    return model


def _converted(library: Any, layer: nn.Module, settings: BnbSettings) -> nn.Module:  # Any: bitsandbytes' own classes
    assert isinstance(layer, nn.Linear), "only linear layers are exchanged"
    weight = layer.weight.detach()
    with torch.device("meta"):
        made: nn.Module = _empty(library, layer, settings)
    kept: dict[str, Any] = {"requires_grad": False}
    if settings.kind == "llm_int8":
        made.weight = library.Int8Params(weight, has_fp16_weights=False, **kept)
    else:
        kept |= {"quant_type": settings.kind, "compress_statistics": settings.double_quantization, "module": made}
        made.weight = library.Params4bit(weight, **kept)
    made.bias = layer.bias
    return made.to(weight.device).train(layer.training)  # moving is what quantizes


def _empty(library: Any, layer: nn.Linear, settings: BnbSettings) -> Any:
    sizes = (layer.in_features, layer.out_features, layer.bias is not None)
    if settings.kind == "llm_int8":
        return library.Linear8bitLt(*sizes, has_fp16_weights=False, threshold=settings.outlier_threshold)
    return library.Linear4bit(
        *sizes,
        compute_dtype=settings.compute_dtype or layer.weight.dtype,
        compress_statistics=settings.double_quantization,
        quant_type=settings.kind,
    )
