"""Heads of attention under tensor parallelism: how many a rank computes, and the counts that modules keep of them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Final

from torch import nn

from hasten.errors import ConfigError
from hasten.runtime.axes import divisors
from hasten.strategies.tensor.head_counts import use_of
from hasten.strategies.tensor.layers import BLOCKS, matrix_of
from hasten.strategies.tensor.split import Role, Split

QUERY: Final = re.compile(r"(^|_)(q|query|wq)(_|$)|^to_q$")
KEY: Final = re.compile(r"(^|_)(k|key|wk|v|value|wv)(_|$)|^to_[kv]$")
"""Names of projections of keys and of values."""
_SIZES: Final = ("head_dim", "attention_head_size", "key_value_proj_dim", "head_size", "d_head", "dim_head", "d_k")
_COUNTS: Final = ("n_head", "n_heads", "num_heads", "num_attention_heads", "heads", "nhead")
_KEY_COUNTS: Final = ("num_key_value_heads", "n_kv_heads", "n_kv_head", "num_kv_heads")
_WIDTHS: Final = ("inner_dim", "all_head_size", "split_size")
"""Attributes in which attention keeps the width of all its heads."""
_GROUPS: Final = "num_key_value_groups"
"""The attribute in which attention keeps how many heads of queries use one head of keys."""


def role_of(name: str) -> Role | None:
    """Return what a projection gives, by its name; None for any other layer."""
    leaf = name.rpartition(".")[2]
    return "query" if QUERY.search(leaf) else "key" if KEY.search(leaf) else None


def holder_of(model: nn.Module, name: str) -> nn.Module:
    """Return the module that holds a layer."""
    return model.get_submodule(name.rpartition(".")[0])


def number(module: nn.Module, names: Sequence[str]) -> int | None:
    """Return the first of the module's attributes that is a positive whole number, or its configuration's."""
    for where in (module, getattr(module, "config", None)):
        for name in names:
            value = getattr(where, name, None)
            if isinstance(value, int) and value > 0:
                return value
    return None


def head_size(holder: nn.Module, width: int) -> int | None:
    """Return the features of one head in an attention module whose queries have `width` features; None if unknown."""
    size = number(holder, _SIZES)
    if size is not None and width % size == 0:
        return size
    count = number(holder, _COUNTS)
    return width // count if count is not None and width % count == 0 else None


def counts_heads(holder: nn.Module) -> bool:
    """Return True if a module has an attribute of its own that counts heads."""
    return any(isinstance(vars(holder).get(name), int) for name in _COUNTS)


def share(model: nn.Module, split: Split, ranks: int) -> None:
    """Let several ranks compute one head of keys or values where ranks outnumber those heads."""
    for _, size, layers in _attention(model, split):
        for name, role in layers.items():
            heads, rest = divmod(_width(model, split, name), size)
            spare = heads and not rest and heads % ranks and ranks % heads == 0
            if role == "key" and split.styles[name] == "colwise" and spare:
                split.styles[name] = "replicate_heads"
                split.numbers[name] = heads


def fit(model: nn.Module, split: Split, ranks: int) -> None:
    """Check that no head is cut in two, and note the counts of heads on one rank.

    Raises: ConfigError with the sizes that would work.
    """
    for parent, size, layers in _attention(model, split):
        for name in layers:
            heads, rest = divmod(_width(model, split, name), size)
            if not rest and heads % ranks and split.styles[name] != "replicate_heads":
                raise ConfigError(
                    f"tp_size={ranks} does not divide the {heads} heads of {name!r}; a head would be cut in two. Set "
                    f"tp_size to one of {divisors(heads)}."
                )
        _divide(model, parent, layers, size, split, ranks)


def _attention(model: nn.Module, split: Split) -> Iterator[tuple[str, int, dict[str, Role]]]:
    """Yield each module that holds projections whose parts stay apart, the size of its heads, and those projections."""
    held: dict[str, dict[str, Role]] = {}
    for name, style in split.styles.items():
        role = split.roles.get(name) or (role_of(name) if style in ("colwise", "replicate_heads") else None)
        if role is not None and style in ("colwise", "replicate_heads", *dict(BLOCKS)):
            held.setdefault(name.rpartition(".")[0], {})[name] = role
    for parent, layers in held.items():
        widths = [_width(model, split, name) for name, role in layers.items() if role == "query"]
        size = head_size(model.get_submodule(parent), widths[0]) if widths else None
        if size is not None:
            yield parent, size, layers


def _width(model: nn.Module, split: Split, name: str) -> int:
    """Return the features of one projection; a layer that joins several has that many times more."""
    sizes = matrix_of(model.get_submodule(name))
    return 0 if sizes is None else sizes.outputs // dict(BLOCKS).get(split.styles[name], 1)


def _divide(model: nn.Module, parent: str, layers: dict[str, Role], size: int, split: Split, ranks: int) -> None:
    """Note the values that counts of one attention module have on a rank."""
    holder = model.get_submodule(parent)
    heads = {role: _width(model, split, name) // size for name, role in layers.items()}
    queries, keys = heads.get("query", 0), heads.get("key", heads.get("query", 0))
    made: dict[str, int] = {}
    if split.automatic:
        wanted = ((_COUNTS, queries, queries // ranks), (_KEY_COUNTS, keys, max(1, keys // ranks)))
        for names, whole, part in (*wanted, (_WIDTHS, queries * size, queries * size // ranks)):
            own = [name for name in names if vars(holder).get(name) == whole]
            made |= {name: part for name in own if use_of(holder, name) == "shape"}
    if keys < ranks and isinstance(getattr(holder, _GROUPS, None), int):
        made[_GROUPS] = queries // ranks
    if made:
        split.attributes.setdefault(parent, {}).update(made)


def unclear_count(holder: nn.Module) -> str | None:
    """Return why an attention module could not compute a part of its heads with its code as it is; None if it can."""
    for name in (*_COUNTS, *_KEY_COUNTS):
        if isinstance(vars(holder).get(name), int) and (use := use_of(holder, name)) in ("both", "unknown"):
            if use == "both":
                return (
                    f"{type(holder).__name__}.forward uses {name} as a number of heads and divides the width of all heads by "
                    "it; with view(batch, length, -1, head_dim) it could be split"
                )
            return f"the source of {type(holder).__name__}, which shows how {name} is used, is not there to be read"
    return None


def per_head_tables(holder: nn.Module, heads: int) -> list[str]:
    """Return the tables of an attention module that have a column for each head, such as T5's relative positions."""
    return [n for n, m in holder.named_children() if isinstance(m, nn.Embedding) and m.embedding_dim == heads]


def per_head_tensor(holder: nn.Module, heads: int) -> str | None:
    """Return a parameter in an attention module, outside layers and norms, that has an entry for each head."""
    for name, module in holder.named_modules():
        table = isinstance(module, nn.Embedding) and name in per_head_tables(holder, heads)
        if table or matrix_of(module) is not None or "Norm" in type(module).__name__:
            continue
        for leaf, parameter in module.named_parameters(recurse=False):
            if heads in parameter.shape:
                return f"{name}.{leaf}" if name else leaf
    return None


def norms_of_heads(model: nn.Module, split: Split) -> Iterator[str]:
    """Yield norms of queries and keys beside their split projections, which see this rank's heads only."""
    held: dict[str, list[str]] = {}
    for name, style in split.styles.items():
        if style in ("colwise", "replicate_heads"):
            held.setdefault(name.rpartition(".")[0], []).append(name)
    for parent, layers in held.items():
        module = model.get_submodule(parent)
        sizes = [s for a in _SIZES if isinstance(s := getattr(module, a, None), int) and s > 0]
        inputs = {sizes_of.inputs for name in layers if (sizes_of := matrix_of(model.get_submodule(name)))}
        for leaf, part in module.named_children():
            named = QUERY.search(leaf) or re.search(r"(^|_)(k|key|wk)(_|$)", leaf)
            widths = {p.numel() for p in part.parameters(recurse=False)}
            if named and "Norm" in type(part).__name__ and widths and widths <= set(sizes[:1]) - inputs:
                yield f"{parent}.{leaf}" if parent else leaf


def divide_named(model: nn.Module, split: Split, divide: Sequence[str], ranks: int) -> None:
    """Note the values of attributes that `tp_divide` names. Raises: ConfigError for a name that no such module has."""
    seen: set[str] = set()
    parents = {name.rpartition(".")[0]: None for name, style in split.styles.items() if style.startswith("colwise")}
    for parent in parents:
        module = model.get_submodule(parent)
        for name in divide:
            value = getattr(module, name, None)
            if not isinstance(value, int):
                continue
            if value % ranks:
                raise ConfigError(
                    f"tp_size={ranks} does not divide {parent}.{name}={value}, which tp_divide asks to divide; set "
                    f"tp_size to one of {divisors(value)}."
                )
            seen.add(name)
            split.attributes.setdefault(parent, {})[name] = value // ranks
    if missing := [name for name in divide if name not in seen]:
        raise ConfigError(
            f"tp_divide names {missing[0]!r}, but no module whose layers are split has a whole number of that name, so "
            "it would do nothing; check the spelling."
        )
