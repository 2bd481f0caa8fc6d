"""Attention heads under tensor parallelism: their number on a rank, and norms that see one rank's heads."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Final

from torch import nn

from hasten.errors import ConfigError
from hasten.runtime.mesh_plan import divisors
from hasten.strategies.tensor.layers import LayerSplit, matrix_of

QUERY: Final = re.compile(r"(^|_)(q|query|wq)(_|$)|^to_q$")
KEY: Final = re.compile(r"(^|_)(k|key|wk|v|value|wv)(_|$)|^to_[kv]$")
"""Names of projections of keys and of values."""
_SIZES: Final = (
    "head_dim",
    "attention_head_size",
    "key_value_proj_dim",
    "head_size",
    "d_head",
    "dim_head",
    "d_k",
)
_COUNTS: Final = (
    "n_head",
    "n_heads",
    "num_heads",
    "num_attention_heads",
    "heads",
    "nhead",
)


def first_positive_integer(
    module: nn.Module, attribute_names: Sequence[str]
) -> int | None:
    """Return the first of these attributes, of the module or its configuration, that is a positive integer."""
    for holder in (module, getattr(module, "config", None)):
        for name in attribute_names:
            value = getattr(holder, name, None)
            if isinstance(value, int) and value > 0:
                return value
    return None


def head_size(holder: nn.Module, width: int) -> int | None:
    """Return the head size of an attention module whose queries have `width` features; None if unknown."""
    size = first_positive_integer(holder, _SIZES)
    if size is not None and width % size == 0:
        return size
    count = first_positive_integer(holder, _COUNTS)
    if count is not None and width % count == 0:
        return width // count
    return None


def refuse_split_heads(
    model: nn.Module, layer_split: LayerSplit, num_ranks: int
) -> None:
    """Raise ConfigError, with sizes that work, if a head would be split between ranks."""
    for head_width, layers in _split_attention(model, layer_split):
        for name in layers:
            heads, remainder = divmod(_output_width(model, name), head_width)
            if not remainder and heads % num_ranks:
                raise ConfigError(
                    f"tp_size={num_ranks} does not divide the {heads} heads of {name!r}; a head would be split. Set tp_size to one of "
                    f"{divisors(heads)}."
                )


def _split_attention(
    model: nn.Module, layer_split: LayerSplit
) -> Iterator[tuple[int, list[str]]]:
    """Yield the head size of each module with split projections, and the names of its projections of queries, keys and values."""
    projections: dict[str, list[str]] = {}
    for name, style in layer_split.styles.items():
        if style == "colwise" and (
            QUERY.search(_last_name(name)) or KEY.search(_last_name(name))
        ):
            projections.setdefault(name.rpartition(".")[0], []).append(name)
    for parent, names in projections.items():
        widths = []
        for name in names:
            if QUERY.search(_last_name(name)):
                widths.append(_output_width(model, name))
        if widths:
            size = head_size(model.get_submodule(parent), widths[0])
        else:
            size = None
        if size is not None:
            yield size, names


def _last_name(name: str) -> str:
    return name.rpartition(".")[2]


def _output_width(model: nn.Module, name: str) -> int:
    """Return the output features of a projection."""
    sizes = matrix_of(model.get_submodule(name))
    return 0 if sizes is None else sizes.outputs


def norms_of_heads(model: nn.Module, layer_split: LayerSplit) -> Iterator[str]:
    """Yield the norms of queries and keys beside split projections; such norms see this rank's heads only."""
    layers_by_parent: dict[str, list[str]] = {}
    for name, style in layer_split.styles.items():
        if style == "colwise":
            layers_by_parent.setdefault(name.rpartition(".")[0], []).append(name)
    for parent, layers in layers_by_parent.items():
        module = model.get_submodule(parent)
        sizes = [
            size
            for attribute in _SIZES
            if isinstance(size := getattr(module, attribute, None), int) and size > 0
        ]
        inputs = {
            matrix.inputs
            for name in layers
            if (matrix := matrix_of(model.get_submodule(name)))
        }
        for child_name, norm in module.named_children():
            is_named = QUERY.search(child_name) or re.search(
                r"(^|_)(k|key|wk)(_|$)", child_name
            )
            widths = {parameter.numel() for parameter in norm.parameters(recurse=False)}
            if (
                is_named
                and "Norm" in type(norm).__name__
                and widths
                and widths <= set(sizes[:1]) - inputs
            ):
                yield f"{parent}.{child_name}" if parent else child_name


def divide_named(
    model: nn.Module, layer_split: LayerSplit, divide: Sequence[str], num_ranks: int
) -> None:
    """Record per-rank values of the attributes in `tp_divide`. Raises: ConfigError for a name that no such module has."""
    found_attributes: set[str] = set()
    parents = []
    for name, style in layer_split.styles.items():
        if style.startswith("colwise"):
            parents.append(name.rpartition(".")[0])
    for parent in dict.fromkeys(parents):
        module = model.get_submodule(parent)
        for name in divide:
            value = getattr(module, name, None)
            if not isinstance(value, int):
                continue
            if value % num_ranks:
                raise ConfigError(
                    f"tp_size={num_ranks} does not divide {parent}.{name}={value}, which is listed in tp_divide; set tp_size to one of "
                    f"{divisors(value)}."
                )
            found_attributes.add(name)
            layer_split.attributes.setdefault(parent, {})[name] = value // num_ranks
    if missing_names := [name for name in divide if name not in found_attributes]:
        raise ConfigError(
            f"tp_divide names {missing_names[0]!r}, but no module whose layers are split has an integer attribute of that name, so it would "
            "have no effect; check the spelling."
        )
