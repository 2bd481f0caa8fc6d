"""Search for layers that tensor parallelism can split, by structure: attention, MLPs and experts."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Final

from torch import nn

from hasten.strategies.blocks import repeated_blocks
from hasten.strategies.experts.plan import stacked_experts
from hasten.strategies.tensor.heads import (
    counts_heads,
    head_size,
    holder_of,
    per_head_tables,
    per_head_tensor,
    role_of,
    unclear_count,
)
from hasten.strategies.tensor.layers import BLOCKS, LayerSplit, Matrix, linear_layers

Layers = list[tuple[str, Matrix]]
_OUTPUTS: Final = ("o", "wo", "out", "proj", "dense", "output")
"""Words in the names of attention's output projection."""
_JOINED: Final = (
    "it concatenates queries, keys and values in an unknown order; name it 'colwise_thirds' if they are concatenated as whole "
    "projections, 'colwise' if they are concatenated per head"
)
_FUSED: Final = re.compile(r"qkv|query_key_value|c_attn|in_proj", re.IGNORECASE)
_NO_PARTNER: Final = "no layer with the original width follows it"


def find(model: nn.Module, split: LayerSplit, inside: Callable[[str], bool]) -> None:
    """Add the usual layers of repeated blocks to `split`, except for blocks where `inside` is true, which have a plan."""
    for prefix, block in repeated_blocks(model):
        if inside(prefix):
            continue
        rest = _named_attention(model, linear_layers(block, prefix), split)
        rest = _unnamed_attention(model, rest, split)
        _split_perceptrons(rest, block, split)


def find_experts(model: nn.Module, split: LayerSplit, ranks: int) -> None:
    """Add modules of stacked experts to `split` if `ranks` divides their number."""
    for name, number in stacked_experts(model).items():
        if name in split.styles:
            continue
        if getattr(holder_of(model, name), "base_layer", None) is model.get_submodule(name):
            split.left[name] = "an adapter uses its whole weights"
        elif number % ranks:
            split.left[name] = f"tp_size={ranks} does not divide its {number} experts"
        else:
            split.styles[name] = "experts"
            split.numbers[name] = number


# -- attention --------------------------------------------------------------------------------------------------------
def _named_attention(model: nn.Module, layers: Layers, split: LayerSplit) -> Layers:
    """Split projections named as queries, keys and values, and their output projection; return the other layers."""
    rest: Layers = []
    waiting: Layers = []
    for name, layer in layers:
        if role_of(name) is not None and not _joins(model, name, layer):
            waiting.append((name, layer))
        elif len(waiting) == 3 and layer.inputs == _query(waiting).outputs:
            _split_attention(model, waiting, name, split)
            waiting = []
        else:
            rest.append((name, layer))
    return sorted([*rest, *waiting], key=layers.index) if waiting else rest


def _query(waiting: Layers) -> Matrix:
    return next((layer for name, layer in waiting if role_of(name) == "query"), waiting[0][1])


def _joins(model: nn.Module, name: str, layer: Matrix) -> int:
    """Return the number of equal projections that a transposed layer joins, as in GPT-2; 0 if it joins none."""
    width = getattr(holder_of(model, name), "split_size", None)
    if layer.out_dim != 1 or not isinstance(width, int) or not width:
        return 0
    return next((number for _, number in BLOCKS if layer.outputs == number * width), 0)


def _unnamed_attention(model: nn.Module, layers: Layers, split: LayerSplit) -> Layers:
    """Split attention recognised by sizes in a module with a number of heads; return the other layers."""
    rest: Layers = []
    for parent, held in _by_holder(layers):
        holder = model.get_submodule(parent)
        if not counts_heads(holder):
            rest += _without_projections(held, split)
        elif any(_joins(model, name, layer) for name, layer in held):
            _split_joined(model, held, split)
        elif (unit := _three_and_one(held)) is not None:
            projections, out = unit
            _split_attention(model, projections, out, split)
        else:
            rest += _without_projections(held, split)
    return sorted(rest, key=layers.index)


def _without_projections(held: Layers, split: LayerSplit) -> Layers:
    """Return a module's layers without those that look like attention projections, which stay whole."""
    rest: Layers = []
    for name, layer in held:
        others = [other for known, other in held if known != name]
        narrower = any(m.outputs == layer.inputs and m.inputs < layer.outputs for m in others)
        if narrower and (len(held) == 2 or _FUSED.search(name.rpartition(".")[2])):
            split.left[name] = _JOINED
        elif role_of(name) is not None:
            split.left[name] = "no output projection follows it"
        else:
            rest.append((name, layer))
    return rest


def _by_holder(layers: Layers) -> Iterator[tuple[str, Layers]]:
    held: dict[str, Layers] = {}
    for name, layer in layers:
        held.setdefault(name.rpartition(".")[0], []).append((name, layer))
    yield from held.items()


def _split_joined(model: nn.Module, held: Layers, split: LayerSplit) -> None:
    """Split a layer that joins several projections, and the output projection."""
    joined = {name: _joins(model, name, layer) for name, layer in held}
    width = next(layer.outputs // joined[name] for name, layer in held if joined[name])
    single = [(name, layer) for name, layer in held if not joined[name]]
    queries = [name for name, _ in single if role_of(name) == "query"]
    outs = [name for name, layer in single if name not in queries and layer.inputs == width]
    if len(outs) != 1 or len(queries) + 1 != len(single):
        split.left.update(dict.fromkeys(joined, "no output projection follows it"))
        return
    holder = holder_of(model, outs[0])
    if not _divisible_heads(holder, width, list(joined), split):
        return
    for name, number in joined.items():
        if name in outs:
            split.styles[name] = "rowwise"
        else:
            split.styles[name] = next((style for style, count in BLOCKS if count == number), "colwise")
            split.roles[name] = "query" if number != 2 else "key"


def _three_and_one(held: Layers) -> tuple[Layers, str] | None:
    """Return three projections and the output projection; None if the sizes do not identify them."""
    if len(held) != 4:
        return None
    words = [set(name.rpartition(".")[2].split("_")) & set(_OUTPUTS) for name, _ in held]
    named = [index for index, found in enumerate(words) if found]
    last = named[0] if len(named) == 1 else 3
    out_name, out = held[last]
    three = [pair for index, pair in enumerate(held) if index != last]
    queries = [pair for pair in three if pair[1].outputs == out.inputs]
    keys = sorted({layer.outputs for _, layer in three})
    if not queries or len(keys) > 2 or any(out.inputs % width for width in keys):
        return None
    if len(keys) == 2 and len(queries) != 1:  # two wide ones and one narrow one cannot be keys and values
        return None
    return [queries[0], *(pair for pair in three if pair is not queries[0])], out_name


def _split_attention(model: nn.Module, projections: Layers, out: str, split: LayerSplit) -> None:
    query = next((name for name, _ in projections if role_of(name) == "query"), projections[0][0])
    width = dict(projections)[query].outputs
    holder = holder_of(model, query)
    names = [name for name, _ in projections]
    if not _divisible_heads(holder, width, [*names, out], split):
        return
    for name in names:
        split.styles[name] = "colwise"
        split.roles[name] = "query" if name == query else "key"
    split.styles[out] = "rowwise"
    size = head_size(holder, width)
    parent = query.rpartition(".")[0]
    for leaf in per_head_tables(holder, width // size) if size else ():
        split.styles[f"{parent}.{leaf}"] = "embedding_colwise"


def _divisible_heads(holder: nn.Module, width: int, names: list[str], split: LayerSplit) -> bool:
    """Return whether an attention module's heads can be split; the reason is recorded if they cannot."""
    size = head_size(holder, width)
    if size is None:
        why = f"{type(holder).__name__} has no attribute with its number of heads, so a head might be split"
    elif (own := per_head_tensor(holder, width // size)) is not None:
        why = f"{type(holder).__name__}.{own} has an entry for each head"
    elif (unclear := unclear_count(holder)) is not None:
        why = unclear
    else:
        return True
    split.left.update(dict.fromkeys(names, why))
    return False


# -- MLPs -------------------------------------------------------------------------------------------------------------
def _split_perceptrons(layers: Layers, block: nn.Module, split: LayerSplit) -> None:
    """Split layers that widen by columns, and the layer that restores their width by rows."""
    normed = {
        size
        for part in block.modules()
        if "Norm" in type(part).__name__
        for size in [*getattr(part, "normalized_shape", ()), *(p.shape[0] for p in part.parameters() if p.ndim)]
    }
    rest: Layers = []
    for _, held in _by_holder(layers):
        narrow = [(name, layer) for name, layer in held if layer.outputs < layer.inputs]
        back = narrow[0][1] if len(narrow) == 1 else None
        wide = [name for name, m in held if back and (m.inputs, m.outputs) == (back.outputs, back.inputs)]
        if back is not None and len(wide) + 1 == len(held) and len(wide) > 0 and back.inputs not in normed:
            split.styles.update(dict.fromkeys(wide, "colwise"))
            split.styles[narrow[0][0]] = "rowwise"
        else:
            rest += held
    _split_in_order(sorted(rest, key=layers.index), normed, split)


def _split_in_order(layers: Layers, normed: set[int], split: LayerSplit) -> None:
    """Split pairs of layers that follow each other in a block, such as pairs in separate modules."""
    wide: Layers = []
    for name, layer in layers:
        if wide and layer.inputs == wide[0][1].outputs and layer.outputs == wide[0][1].inputs:
            split.styles.update({other: "colwise" for other, _ in wide})
            split.styles[name] = "rowwise"
            wide = []
            continue
        if wide and (layer.inputs, layer.outputs) != (wide[0][1].inputs, wide[0][1].outputs):
            split.left.update({other: _NO_PARTNER for other, _ in wide})
            wide = []
        if layer.outputs <= layer.inputs:
            split.left[name] = "its role in the block is unclear from its size"
        elif layer.outputs in normed:
            split.left[name] = f"a norm over {layer.outputs} features may follow it"
        else:
            wide.append((name, layer))
    split.left.update({other: _NO_PARTNER for other, _ in wide})
