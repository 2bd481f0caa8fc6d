"""Layers that tensor parallelism can split: their sizes, and the dimension of each parameter that a style splits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

from torch import nn

from hasten.config.sections.parallel import TensorStyle

_MULTIPLIED: Final = (nn.MultiheadAttention,)
"""Modules that use the weights of their layers without calling the layers."""


@dataclass(frozen=True, slots=True)
class Matrix:
    """Sizes of a linear layer, and the output dimension of its weight."""

    inputs: int
    outputs: int
    out_dim: int
    """0 for `nn.Linear`; 1 for a transposed weight, as in transformers' `Conv1D`."""


def adapted_layer(module: nn.Module) -> nn.Module:
    """Return the layer that a PEFT adapter wraps, or the module itself."""
    for attribute in ("base_layer", "original_module"):
        layer = getattr(module, attribute, None)
        if isinstance(layer, nn.Module):
            return layer
    return module


def matrix_of(module: nn.Module) -> Matrix | None:
    """Return the sizes of a linear layer, also of one in an adapter; None for other modules."""
    module = adapted_layer(module)
    weight = getattr(module, "weight", None)
    shape = tuple(getattr(weight, "shape", ()))
    if isinstance(module, nn.Linear) and shape == (
        module.out_features,
        module.in_features,
    ):
        return Matrix(module.in_features, module.out_features, 0)
    nx = getattr(module, "nx", None)
    nf = getattr(module, "nf", None)
    if (
        type(module).__name__ == "Conv1D"
        and isinstance(nx, int)
        and isinstance(nf, int)
        and shape == (nx, nf)
    ):
        return Matrix(nx, nf, 1)
    return None


def linear_layers(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, Matrix]]:
    """Yield the linear layers that a module calls, by name and in order."""
    for child_name, child in module.named_children():
        name = f"{prefix}.{child_name}" if prefix else child_name
        matrix = matrix_of(child)
        if matrix is not None:
            yield name, matrix
        elif not isinstance(child, _MULTIPLIED):
            yield from linear_layers(child, name)


def split_dims(layer: nn.Module, tensor_style: TensorStyle) -> dict[str, int]:
    """Return the dimension along which each parameter of a layer is split; parameters left out stay whole."""
    parameters = dict(layer.named_parameters(recurse=False))
    if tensor_style == "experts":
        return dict.fromkeys(parameters, 0)
    if tensor_style in ("embedding_rowwise", "embedding_colwise"):
        return {"weight": 0 if tensor_style == "embedding_rowwise" else 1}
    sizes = matrix_of(layer)
    if sizes is None or not tensor_style.startswith(("colwise", "rowwise")):
        return {}
    if tensor_style.startswith("rowwise"):
        return {"weight": 1 - sizes.out_dim}
    return {"weight": sizes.out_dim} | ({"bias": 0} if "bias" in parameters else {})


@dataclass(slots=True)
class LayerSplit:
    """Tensor-parallel plan of one model: the split layers by name, and the layers that its own plan left whole."""

    source: str
    styles: dict[str, TensorStyle] = field(default_factory=dict)
    left: dict[str, str] = field(default_factory=dict)
    """Reasons for leaving a layer whole, by name."""
    summed: list[str] = field(default_factory=list)
    """Whole modules that each rank applies to its heads only; their gradients are summed over ranks."""
    attributes: dict[str, dict[str, int]] = field(default_factory=dict)
    """Per-rank values of attributes that count split things, such as heads, by module name."""
    numbers: dict[str, int] = field(default_factory=dict)
    """Number of experts in modules of experts, by name."""
    common_dropouts: list[str] = field(default_factory=list)
    """Dropouts of adapters whose input is whole: they drop the same elements on every rank."""

    def drop_layer(self, name: str, why: str) -> None:
        """Leave a layer whole and record the reason."""
        self.styles.pop(name, None)
        self.left[name] = why
