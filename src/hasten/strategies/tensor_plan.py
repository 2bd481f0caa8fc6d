"""Which layers of a model are split over the tensor-parallel ranks, and how: given, carried by the model, or found."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import translate
from typing import Final, cast, get_args

from torch import nn

from hasten.config.parallel import TensorStyle
from hasten.errors import ConfigError, PrepareError
from hasten.runtime.axes import divisors
from hasten.strategies.blocks import repeated_blocks

STYLES: Final = get_args(TensorStyle)
_ALIASES: Final = (
    ("colwise_rep", "colwise_gather_output"),
    ("rowwise_rep", "rowwise_split_input"),
    ("replicated_with_grad_allreduce", "replicate_sum_gradients"),
)
"""Names that plans of transformers' models use."""
_QUERY: Final = re.compile(r"(^|_)(q|query|wq)(_|$)|^to_q$")
_KEY: Final = re.compile(r"(^|_)(k|key|wk)(_|$)|^to_k$")
_VALUE: Final = re.compile(r"(^|_)(v|value|wv)(_|$)|^to_v$")
_HEAD_SIZES: Final = ("head_dim", "attention_head_size", "key_value_proj_dim", "head_size", "d_head", "dim_head", "d_k")
_HEAD_COUNTS: Final = (
    *("n_head", "n_heads", "num_heads", "num_attention_heads", "heads", "nhead"),
    *("num_key_value_heads", "n_kv_heads", "n_kv_head", "num_kv_heads"),
)


@dataclass(slots=True)
class Split:
    """The layers of one model that are split, by name, and the layers an automatic plan looked at and left whole."""

    source: str
    styles: dict[str, TensorStyle] = field(default_factory=dict)
    left: dict[str, str] = field(default_factory=dict)
    """Why, by name."""
    summed: list[str] = field(default_factory=list)
    """Whole modules that each rank applies to its own heads alone: their gradients are summed over the ranks."""
    attributes: dict[str, list[str]] = field(default_factory=dict)
    """Counts that a module keeps of what is split, such as heads, by the module's name: divided by the ranks."""


def decide(model: nn.Module, plan: Mapping[str, str] | str, divide: Sequence[str], ranks: int) -> Split:
    """What is split, checked against the layers' sizes before anything is touched.

    Raises: ConfigError for a plan that names what does not exist or cannot be split; PrepareError when an automatic
    plan finds nothing.
    """
    if not isinstance(plan, str):
        split = _matched(model, plan, "tp_plan")
    elif carried := getattr(model, "tp_plan", None):
        split = _matched(model, carried, f"the plan {type(model).__name__} carries", lenient=True)
    else:
        split = _found(model)
    if not split.styles:
        raise PrepareError(
            f"no layer of {type(model).__name__} can be split automatically over {ranks} ranks"
            f"{_reasons(split.left)}; every rank would compute the same. Name the layers with "
            "ParallelismConfig(tp_plan={'layers.*.up': 'colwise', 'layers.*.down': 'rowwise'}), or set tp_size=1."
        )
    for name, style in split.styles.items():
        _check_layer(model, name, style, ranks)
    _check_heads(model, split, ranks)
    split.summed = list(dict.fromkeys([*split.summed, *_norms_of_heads(model, split)]))
    split.attributes = dict(_attributes(model, split, divide, ranks))
    return split


def _reasons(left: Mapping[str, str]) -> str:
    return "".join(f"; {name}: {why}" for name, why in list(left.items())[:3])


def _matched(model: nn.Module, plan: Mapping[str, str], source: str, lenient: bool = False) -> Split:
    """The modules each pattern names; the first pattern that fits a module decides."""
    split = Split(source)
    names = [name for name, _ in model.named_modules(remove_duplicate=False) if name]
    for pattern, word in plan.items():
        style = dict(_ALIASES).get(word, word)
        if style not in STYLES and not lenient:
            raise ConfigError(
                f"{source}: {pattern!r} asks for {word!r}, which is not a way to split a layer; use one of "
                f"{', '.join(STYLES)}."
            )
        matches = re.compile(translate(pattern)).match
        chosen = [name for name in names if matches(name)]
        if not chosen and not lenient:
            known = ", ".join(name for name, part in model.named_modules() if _splittable(part))
            raise ConfigError(
                f"{source}: {pattern!r} matches no module of {type(model).__name__}, so it would do nothing; layers "
                f"that can be split are {known or 'none'}."
            )
        for name in chosen:
            if style not in STYLES:
                split.left.setdefault(name, f"{word!r} is not supported")
            elif style == "replicate_sum_gradients":
                split.summed.append(name)
            elif style != "replicate":
                split.styles.setdefault(name, cast(TensorStyle, style))
    return split


def _splittable(module: nn.Module) -> bool:
    return isinstance(module, (nn.Linear, nn.Embedding))


def _found(model: nn.Module) -> Split:
    """The usual attention and perceptron layers of repeated blocks, recognised by names and sizes."""
    split = Split("automatic plan")
    for prefix, block in repeated_blocks(model):
        linears = [(f"{prefix}.{name}", part) for name, part in block.named_modules() if isinstance(part, nn.Linear)]
        rest = _split_attention(linears, split)
        _split_perceptrons(rest, block, prefix, split)
    return split


Layers = list[tuple[str, nn.Linear]]


def _split_attention(linears: Layers, split: Split) -> Layers:
    """Split query, key and value projections by columns and what follows them by rows; the layers that remain."""
    rest: Layers = []
    waiting: dict[str, nn.Linear] = {}
    for name, layer in linears:
        leaf = name.rpartition(".")[2]
        if any(pattern.search(leaf) for pattern in (_QUERY, _KEY, _VALUE)):
            waiting[name] = layer
        elif len(waiting) == 3 and layer.in_features == next(iter(waiting.values())).out_features:
            split.styles.update(dict.fromkeys(waiting, "colwise"))
            split.styles[name] = "rowwise"
            waiting = {}
        else:
            rest.append((name, layer))
    for name in waiting:
        split.left[name] = "no output projection follows it"
    return rest


def _split_perceptrons(linears: Layers, block: nn.Module, prefix: str, split: Split) -> None:
    """Split layers that widen by columns, and the one that brings their width back by rows."""
    normed = {
        size
        for part in block.modules()
        if "Norm" in type(part).__name__
        for size in [*getattr(part, "normalized_shape", ()), *(p.shape[0] for p in part.parameters() if p.ndim)]
    }
    wide: Layers = []
    for name, layer in linears:
        if wide and layer.in_features == wide[0][1].out_features and layer.out_features == wide[0][1].in_features:
            split.styles.update({other: "colwise" for other, _ in wide})
            split.styles[name] = "rowwise"
            wide = []
        elif wide and (layer.in_features, layer.out_features) != (wide[0][1].in_features, wide[0][1].out_features):
            split.left.update({other: "no layer that brings its width back follows it" for other, _ in wide})
            wide = []
        elif layer.out_features <= layer.in_features:
            split.left[name] = "its place in the block is not clear from its size"
        elif layer.out_features in normed:
            split.left[name] = f"a norm over {layer.out_features} features may follow it"
        else:
            wide.append((name, layer))
    split.left.update({other: "no layer that brings its width back follows it" for other, _ in wide})


def _check_layer(model: nn.Module, name: str, style: TensorStyle, ranks: int) -> None:
    layer = model.get_submodule(name)
    table = style in ("embedding_rowwise", "embedding_colwise")
    if not isinstance(layer, nn.Embedding if table else nn.Linear):
        raise ConfigError(
            f"{name!r} is a {type(layer).__name__}, which cannot be split {style}: that is for "
            f"{'torch.nn.Embedding' if table else 'torch.nn.Linear'}. Leave it out of the plan."
        )
    if isinstance(layer, nn.Embedding):
        what, size = (
            ("rows", layer.num_embeddings) if style == "embedding_rowwise" else ("columns", layer.embedding_dim)
        )
        if layer.max_norm is not None or layer.sparse:
            raise ConfigError(
                f"{name!r} uses max_norm or sparse gradients, which need the whole table; leave it whole."
            )
    elif style in ("colwise", "colwise_gather_output"):
        what, size = "output features", layer.out_features
    else:
        what, size = "input features", layer.in_features
    if size % ranks:
        raise ConfigError(
            f"tp_size={ranks} does not divide the {size} {what} of {name!r}; ranks would hold layers of different "
            f"widths. Set tp_size to one of {divisors(size)}, or leave this layer out of the plan."
        )


def _parents(split: Split) -> Iterator[tuple[str, list[str]]]:
    """The modules that hold layers split by columns whose parts stay apart, with those layers."""
    held: dict[str, list[str]] = {}
    for name, style in split.styles.items():
        if style == "colwise":
            held.setdefault(name.rpartition(".")[0], []).append(name)
    yield from held.items()


def _check_heads(model: nn.Module, split: Split, ranks: int) -> None:
    """Raise when a rank's part of a projection would cut a head in two."""
    for parent, layers in _parents(split):
        module = model.get_submodule(parent)
        for name in layers:
            leaf = name.rpartition(".")[2]
            if not any(pattern.search(leaf) for pattern in (_QUERY, _KEY, _VALUE)):
                continue
            width = model.get_submodule(name).get_parameter("weight").shape[0]
            size = next((s for a in _HEAD_SIZES if isinstance(s := getattr(module, a, None), int) and s > 0), None)
            counts = [c for a in _HEAD_COUNTS if isinstance(c := getattr(module, a, None), int) and c > 0]
            heads = [width // size] if size and width % size == 0 else [c for c in counts if width % c == 0]
            wrong = next((count for count in heads if count % ranks), None)
            if wrong is not None:
                raise ConfigError(
                    f"tp_size={ranks} does not divide the {wrong} heads of {name!r}; a head would be cut in two. Set "
                    f"tp_size to one of {divisors(wrong)}."
                )


def _norms_of_heads(model: nn.Module, split: Split) -> Iterator[str]:
    """Norms of queries and keys beside their split projections, which see this rank's heads only."""
    for parent, layers in _parents(split):
        module = model.get_submodule(parent)
        sizes = [s for a in _HEAD_SIZES if isinstance(s := getattr(module, a, None), int) and s > 0]
        inputs = {model.get_submodule(name).get_parameter("weight").shape[1] for name in layers}
        for leaf, part in module.named_children():
            named = _QUERY.search(leaf) or _KEY.search(leaf)
            widths = {p.numel() for p in part.parameters(recurse=False)}
            if named and "Norm" in type(part).__name__ and widths and widths <= set(sizes[:1]) - inputs:
                yield f"{parent}.{leaf}" if parent else leaf


def _attributes(model: nn.Module, split: Split, divide: Sequence[str], ranks: int) -> Iterator[tuple[str, list[str]]]:
    """The counts to divide, by module. Raises: ConfigError for a name that no module with split layers has."""
    seen: set[str] = set()
    for parent, _ in _parents(split):
        module = model.get_submodule(parent)
        own = [name for name in divide if isinstance(getattr(module, name, None), int)]
        for name in own:
            value = getattr(module, name)
            if value % ranks:
                raise ConfigError(
                    f"tp_size={ranks} does not divide {parent}.{name}={value}, which tp_divide asks to divide; set "
                    f"tp_size to one of {divisors(value)}."
                )
        seen.update(own)
        if own:
            yield parent, own
    if missing := [name for name in divide if name not in seen]:
        raise ConfigError(
            f"tp_divide names {missing[0]!r}, but no module whose layers are split has a whole number of that name, so "
            "it would do nothing; check the spelling."
        )
