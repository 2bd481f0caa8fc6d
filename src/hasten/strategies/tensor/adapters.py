"""Tensor parallelism of layers wrapped by PEFT: the base layer is split, and one matrix of each adapter with it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from hasten.errors import ConfigError
from hasten.strategies.tensor.layers import LayerSplit, base_of

# Any in this file: attributes of PEFT's modules; PEFT need not be installed.


def inner(module: nn.Module) -> nn.Module:
    """Return the layer inside an adapter, or inside a module that PEFT trains a copy of."""
    return base_of(getattr(module, "original_module", module))


def callable_base(model: nn.Module, name: str) -> str | None:
    """Return the name of the base layer that an adapter calls; None if the adapter computes with its weight instead."""
    module = model.get_submodule(name)
    if _uses_weight(module):
        return None
    while isinstance(getattr(module, "base_layer", None), nn.Module):
        name, module = f"{name}.base_layer", module.get_submodule("base_layer")
    return name


def expand(model: nn.Module, split: LayerSplit, advice: Callable[[], str]) -> None:
    """Assign styles to the layers inside wrapped layers: the style of a wrapped layer applies to its base layer.

    An adapter adds `B(A(x))`. For a style that splits outputs, B is split and A is whole; for one that splits inputs, A is
    split and B is whole. Raises: ConfigError for other adapters, with a plan that works for the model.
    """
    for name, style in list(split.styles.items()):
        module = model.get_submodule(name)
        copies: Any = getattr(module, "modules_to_save", None)
        if isinstance(getattr(module, "original_module", None), nn.Module) and isinstance(copies, nn.ModuleDict):
            del split.styles[name]
            parts = [f"{name}.original_module", *(f"{name}.modules_to_save.{key}" for key in copies)]
            split.styles.update(dict.fromkeys(parts, style))
        elif isinstance(getattr(module, "base_layer", None), nn.Module):
            _expand_adapter(name, module, split, advice)


def _expand_adapter(name: str, module: nn.Module, split: LayerSplit, advice: Callable[[], str]) -> None:
    style = split.styles.pop(name)
    number = split.numbers.pop(name, None)
    adapters: Any = getattr(module, "lora_A", None)
    plain = isinstance(adapters, nn.ModuleDict) and not _uses_weight(module)
    if not plain or isinstance(getattr(module.get_submodule("base_layer"), "base_layer", None), nn.Module):
        raise ConfigError(
            f"{name!r} is a {type(module).__module__.partition('.')[0]} {type(module).__name__}, an adapter other than plain LoRA, "
            f"which cannot be split {style} together with its base layer. {advice()}"
        )
    made = [f"{name}.base_layer"]
    by_outputs = not style.startswith("rowwise")
    if not style.startswith("embedding"):
        made += [f"{name}.{'lora_B' if by_outputs else 'lora_A'}.{key}" for key in adapters]
        split.dropouts.update({f"{name}.lora_dropout.{key}": not by_outputs for key in adapters})
    elif style == "embedding_colwise" and len(getattr(module, "lora_embedding_A", ())):
        raise ConfigError(
            f"{name!r} is an embedding with an adapter, which cannot be split by columns. Use 'embedding_rowwise'."
        )
    for part in made:
        split.styles[part] = style
        if number is not None:
            split.numbers[part] = number


def _uses_weight(module: nn.Module) -> bool:
    """Return True for an adapter that computes with its base layer's weight, such as DoRA, or differs from plain LoRA."""
    return bool(getattr(module, "lora_variant", None)) or bool(len(getattr(module, "lora_magnitude_vector", ())))
