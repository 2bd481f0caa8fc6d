"""Weights in four or eight bits through torchao or bitsandbytes, with computation in their original dtype."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Final, Literal

import torch
from torch import nn

from hasten.errors import ConfigError, PrepareError
from hasten.modules.names import is_dtensor
from hasten.modules.quantized import is_bitsandbytes, is_four_bit, is_torchao
from hasten.optional import need

BnbKind = Literal["nf4", "fp4", "llm_int8"]
BNB_KINDS: Final = ("nf4", "fp4", "llm_int8")


@dataclass(frozen=True, slots=True, kw_only=True)
class BnbSettings:
    """Settings of bitsandbytes quantization."""

    kind: BnbKind = "nf4"
    compute_dtype: torch.dtype | None = None
    """Dtype of multiplications with four-bit weights; None for the original dtype."""
    double_quantization: bool = False
    """Quantize the scales of four-bit weights as well."""
    outlier_threshold: float = 6.0
    """Inputs larger than this are multiplied in 16 bits by layers of the kind llm_int8."""


def import_bitsandbytes() -> Any:  # Any: classes of bitsandbytes
    """Import and return bitsandbytes' layers. Raises: MissingPackageError without the package."""
    return need("bitsandbytes.nn", ">=0.45", why="weights in nf4, fp4 or llm_int8")


def replace_linears(
    model: nn.Module, names: Collection[str], settings: BnbSettings
) -> nn.Module:
    """Replace the named linear layers of the model by bitsandbytes layers, in place and one after another."""
    library = import_bitsandbytes()
    for name in names:
        owner_name, _, layer_name = name.rpartition(".")
        setattr(
            model.get_submodule(owner_name),
            layer_name,
            _quantize_linear(library, model.get_submodule(name), settings),
        )
    return model


# Any: classes of bitsandbytes
def _quantize_linear(
    library: Any, layer: nn.Module, settings: BnbSettings
) -> nn.Module:
    assert isinstance(layer, nn.Linear), "only linear layers are exchanged"
    weight = layer.weight.detach()
    with torch.device("meta"):
        quantized_layer: nn.Module = _empty_linear(library, layer, settings)
    weight_options: dict[str, Any] = {"requires_grad": False}
    if settings.kind == "llm_int8":
        quantized_layer.weight = library.Int8Params(
            weight, has_fp16_weights=False, **weight_options
        )
    else:
        weight_options |= {
            "quant_type": settings.kind,
            "compress_statistics": settings.double_quantization,
            "module": quantized_layer,
        }
        quantized_layer.weight = library.Params4bit(weight, **weight_options)
    quantized_layer.bias = layer.bias
    # quantization happens in this move
    return quantized_layer.to(weight.device).train(layer.training)


def _empty_linear(library: Any, layer: nn.Linear, settings: BnbSettings) -> Any:
    sizes = (layer.in_features, layer.out_features, layer.bias is not None)
    if settings.kind == "llm_int8":
        return library.Linear8bitLt(
            *sizes, has_fp16_weights=False, threshold=settings.outlier_threshold
        )
    return library.Linear4bit(
        *sizes,
        compute_dtype=settings.compute_dtype or layer.weight.dtype,
        compress_statistics=settings.double_quantization,
        quant_type=settings.kind,
    )


Kind = Literal["int8", "int4"] | BnbKind


def quantize_weights(
    model: nn.Module,
    kind: Kind = "int8",
    group_size: int | None = None,
    skip_modules: Collection[str] = ("lm_head",),
) -> nn.Module:
    """Return the model with the weights of its linear layers in `kind`, in place; activations keep their dtype.

    "int8" and "int4" are torchao's, "nf4", "fp4" and "llm_int8" bitsandbytes'. Layers whose name contains one of
    `skip_modules` are not changed. int4 stores one scale per `group_size` inputs (128).
    Raises: PrepareError for weights on the meta device; MissingPackageError without the package.
    """
    if kind in BNB_KINDS:
        if group_size is not None:
            raise ConfigError(
                f"group_size={group_size} is only supported for 'int8' and 'int4', not for {kind!r}. Remove it."
            )
        import_bitsandbytes()  # raises for a missing package before weights are examined
    else:
        need("torchao.quantization", ">=0.12", why="quantized weights")
    if kind in BNB_KINDS:
        return replace_linears(
            model, chosen_linears(model, skip_modules), BnbSettings(kind=kind)
        )
    quantization = need("torchao.quantization", ">=0.12", why="quantized weights")
    linear_names = set(chosen_linears(model, skip_modules))
    if kind == "int4":
        _check_groups(model, linear_names, group_size or 128)
    quantization.quantize_(
        model,
        _torchao_config(quantization, kind, group_size),
        lambda _, name: name in linear_names,
    )
    return model


def chosen_linears(model: nn.Module, skip: Collection[str]) -> list[str]:
    """Return the names of the linear layers to quantize. Raises: PrepareError for a layer on the meta device."""
    named_linears = (
        (name, linear_layer)
        for name, linear_layer in model.named_modules()
        if isinstance(linear_layer, nn.Linear)
    )
    linear_layers = {
        name: linear_layer
        for name, linear_layer in named_linears
        if name and not any(skipped_name in name for skipped_name in skip)
    }
    empty = []
    for name, linear_layer in linear_layers.items():
        if linear_layer.weight.is_meta:
            empty.append(name)
    if empty:
        raise PrepareError(
            f"{empty[0]} is on the meta device and has no weights to quantize. Load them first."
        )
    return list(linear_layers)


def _check_groups(model: nn.Module, names: Collection[str], group_size: int) -> None:
    """Raise unless the inputs of all these layers are split evenly into groups. Raises: ConfigError."""
    input_widths = {}
    for name in names:
        input_widths[name] = model.get_submodule(name).get_parameter("weight").shape[1]
    uneven_names = [name for name, width in input_widths.items() if width % group_size]
    if uneven_names:
        name = min(uneven_names)
        divisor = math.gcd(*input_widths.values(), group_size)
        raise ConfigError(
            f"{name} has {input_widths[name]} inputs, which int4 cannot split into groups of {group_size} with one scale each. Pass "
            f"group_size={divisor}, or add it to skip_modules."
        )


# Any: classes of torchao
def _torchao_config(quantization: Any, kind: str, group_size: int | None) -> Any:
    if kind == "int8":
        return quantization.Int8WeightOnlyConfig(group_size=group_size)
    if kind == "int4":
        return quantization.IntxWeightOnlyConfig(
            weight_dtype=getattr(torch, kind),
            granularity=need("torchao.quantization.granularity").PerGroup(
                group_size or 128
            ),
        )
    raise ConfigError(
        f"quantization to {kind!r} is not supported; choose 'int8' or 'int4', or of {', '.join(BNB_KINDS)}."
    )


@torch.no_grad()
def dequantize_weights(model: nn.Module) -> nn.Module:
    """Return the model with plain linear layers that hold the values of its quantized weights, in place.

    Adapters trained on the quantized model fit this model exactly: merge them into it to export one model.
    Raises: PrepareError for weights of a sharded model, and for layers of bitsandbytes with eight bits.
    """
    for name, layer in list(model.named_modules()):
        if is_four_bit(layer):
            plain_layer = _plain_linear(name, layer)
            owner_name, _, layer_name = name.rpartition(".")
            setattr(model.get_submodule(owner_name), layer_name, plain_layer)
            continue
        for key, parameter in list(layer.named_parameters(recurse=False)):
            if is_torchao(parameter):
                # Any: the classes of torchao share no public base
                quantized_weight: Any = parameter.data
                values = getattr(
                    quantized_weight, "get_original_weight", quantized_weight.dequantize
                )  # NF4Tensor's dequantize is another one
                layer._parameters[key] = nn.Parameter(values(), requires_grad=False)
            elif is_bitsandbytes(parameter):
                raise PrepareError(
                    f"{name}.{key} is a {type(parameter).__name__} of bitsandbytes, whose values depend on the inputs, so there is no "
                    "plain weight equal to it; merge adapters into a model of four bits, or into the original weights."
                )
    return model


def _plain_linear(name: str, layer: Any) -> nn.Linear:  # Any: a class of bitsandbytes
    quant_state = getattr(layer.weight, "quant_state", None)
    if quant_state is None or is_dtensor(layer.weight):
        raise PrepareError(
            f"{name}.weight is sharded, or was never quantized, so its values are not all here; save the adapters, build and quantize "
            "the model again on one process, and dequantize that."
        )
    plain_weight = need(
        "bitsandbytes.functional", why="four-bit weights"
    ).dequantize_4bit(layer.weight.data, quant_state)
    layer_sizes = (layer.in_features, layer.out_features, layer.bias is not None)
    with torch.device("meta"):
        plain_layer = nn.Linear(*layer_sizes)
    plain_layer.weight = nn.Parameter(
        plain_weight.to(quant_state.dtype), requires_grad=False
    )
    plain_layer.bias = layer.bias
    return plain_layer.train(layer.training)
