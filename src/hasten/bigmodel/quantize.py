"""Weights in four or eight bits, through torchao or bitsandbytes, computed with in the dtype they had."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Literal

import torch
from torch import nn

from hasten.bigmodel.bnb_layers import BNB_KINDS, BnbKind, BnbSettings, bnb, replace_linears
from hasten.errors import ConfigError, PrepareError
from hasten.optional import need

Kind = Literal["int8", "int4"] | BnbKind


def quantize_weights(
    model: nn.Module,
    kind: Kind = "int8",
    group_size: int | None = None,
    skip_modules: Collection[str] = ("lm_head",),
) -> nn.Module:
    """The model with the weights of its linear layers in `kind`, in place; activations keep their dtype.

    "int8" and "int4" are torchao's, "nf4", "fp4" and "llm_int8" bitsandbytes'. Layers whose name contains one of
    `skip_modules` stay as they are. int4 keeps one scale per `group_size` inputs (128).
    Raises: PrepareError for weights without numbers; MissingPackageError without the package.
    """
    if kind in BNB_KINDS:
        if group_size is not None:
            raise ConfigError(
                f"group_size={group_size} belongs to 'int8' and 'int4'; {kind!r} has its own. Leave it out."
            )
        bnb()  # its absence is said before weights are looked at
        return replace_linears(model, chosen_linears(model, skip_modules), BnbSettings(kind=kind))
    quantization = need("torchao.quantization", ">=0.12", why="quantized weights")
    chosen = set(chosen_linears(model, skip_modules))
    quantization.quantize_(model, _config(quantization, kind, group_size), lambda _, name: name in chosen)
    return model


def chosen_linears(model: nn.Module, skip: Collection[str]) -> list[str]:
    """The linear layers to quantize. Raises: PrepareError when one has no weights yet."""
    parts = ((name, part) for name, part in model.named_modules() if isinstance(part, nn.Linear))
    found = {name: part for name, part in parts if name and not any(one in name for one in skip)}
    empty = [name for name, part in found.items() if part.weight.is_meta]
    if empty:
        raise PrepareError(f"{empty[0]} is on the meta device and has no weights to quantize. Load them first.")
    return list(found)


def _config(quantization: Any, kind: str, group_size: int | None) -> Any:  # Any: torchao's own classes
    if kind == "int8":
        return quantization.Int8WeightOnlyConfig(group_size=group_size)
    if kind == "int4":
        return quantization.IntxWeightOnlyConfig(
            weight_dtype=getattr(torch, kind),
            granularity=need("torchao.quantization.granularity").PerGroup(group_size or 128),
        )
    raise ConfigError(f"weights cannot be kept in {kind!r}; choose 'int8' or 'int4', or of {', '.join(BNB_KINDS)}.")
