"""Weights in four or eight bits, through torchao: quantized when a model is loaded, computed with in its own dtype."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Literal

import torch
from torch import nn

from hasten.errors import ConfigError, PrepareError
from hasten.optional import need

Kind = Literal["int8", "int4"]


def quantize_weights(
    model: nn.Module,
    kind: Kind = "int8",
    group_size: int | None = None,
    skip_modules: Collection[str] = ("lm_head",),
) -> nn.Module:
    """The model with the weights of its linear layers in `kind`, in place; activations keep their dtype.

    Layers whose name contains one of `skip_modules` stay as they are. int4 keeps one scale per `group_size` inputs (128).
    Raises: PrepareError for weights without numbers; MissingPackageError without torchao.
    """
    quantization = need("torchao.quantization", ">=0.12", why="quantized weights")
    names = [name for name, part in model.named_modules() if _wanted(name, part, skip_modules)]
    empty = [name for name in names if model.get_submodule(name).weight.is_meta]
    if empty:
        raise PrepareError(f"{empty[0]} is on the meta device and has no weights to quantize. Load them first.")
    chosen = set(names)
    quantization.quantize_(model, _config(quantization, kind, group_size), lambda _, name: name in chosen)
    return model


def _wanted(name: str, part: nn.Module, skip: Collection[str]) -> bool:
    return isinstance(part, nn.Linear) and not any(one in name for one in skip)


def _config(quantization: Any, kind: str, group_size: int | None) -> Any:  # Any: torchao's own classes
    if kind == "int8":
        return quantization.Int8WeightOnlyConfig(group_size=group_size)
    if kind == "int4":
        return quantization.IntxWeightOnlyConfig(
            weight_dtype=getattr(torch, kind),
            granularity=need("torchao.quantization.granularity").PerGroup(group_size or 128),
        )
    raise ConfigError(f"weights cannot be kept in {kind!r}; choose 'int8' or 'int4'.")
