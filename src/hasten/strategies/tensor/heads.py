"""Attention heads under tensor parallelism: their number on a rank, and the attributes of modules that count them."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Final, Literal

from torch import nn

from hasten.errors import ConfigError
from hasten.runtime.mesh_plan import divisors
from hasten.strategies.tensor.layers import BLOCKS, LayerSplit, Role, matrix_of

Use = Literal["unused", "shape", "divisor", "both", "unknown"]
"""Uses of an attribute that counts heads.

`shape`: it must be the number of heads on one rank. `divisor`: it divides the width of all heads and must not change.
`both`: it is used in both ways, which contradict each other.
"""


def use_of(holder: nn.Module, attribute: str) -> Use:
    """Return the use of a module's attribute in its methods, apart from the constructor."""
    return _use(type(holder), attribute)  # type: ignore[arg-type]  # mypy checks the hash of instances instead of the class


@lru_cache(maxsize=64)  # called for every block of a model, and reading a class's source parses its whole file
def _use(kind: type, attribute: str) -> Use:
    methods = _methods(kind)
    if methods is None:
        return "unknown"
    found = {use for method in methods for use in _uses(method, attribute)}
    if not found:
        return "unused"
    return "both" if len(found) == 2 else next(iter(found))


def _source(kind: type) -> ast.Module | None:
    try:
        return ast.parse(textwrap.dedent(inspect.getsource(kind)))
    except (OSError, TypeError, SyntaxError):  # a class without a file, such as one defined in a console
        return None


def _methods(kind: type) -> list[ast.FunctionDef] | None:
    """Return the methods that a module of this class runs, including inherited ones; None if a source is unavailable."""
    found: list[ast.FunctionDef] = []
    hidden: set[str] = {"__init__", "extra_repr", "__repr__"}
    for one in kind.__mro__:
        if one in nn.Module.__mro__:
            continue
        tree = _source(one)
        if tree is None:
            return None
        own = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef) and n.name not in hidden]
        found += own
        hidden |= {method.name for method in own if not _calls_super(method)}
    return found


def _calls_super(method: ast.FunctionDef) -> bool:
    return any(isinstance(node, ast.Name) and node.id == "super" for node in ast.walk(method))


def _uses(method: ast.FunctionDef, attribute: str) -> Iterator[Literal["shape", "divisor"]]:
    whole = _whole_names(method) if method.name == "forward" else set()
    divisors: set[int] = set()
    for node in ast.walk(method):
        if not isinstance(node, ast.BinOp) or not isinstance(node.op, (ast.FloorDiv, ast.Div)):
            continue
        root = _root(node.left)
        if root is not None and root in whole and _is_attribute(node.right, attribute):
            divisors.add(id(node.right))
    for node in ast.walk(method):
        if _is_attribute(node, attribute):
            yield "divisor" if id(node) in divisors else "shape"


def _is_attribute(node: ast.AST, attribute: str) -> bool:
    return (
        isinstance(node, ast.Attribute)
        and node.attr == attribute
        and isinstance(node.value, ast.Name)
        and node.value.id == "self"
        and isinstance(node.ctx, ast.Load)
    )


def _whole_names(method: ast.FunctionDef) -> set[str]:
    """Return the names in a forward that refer to whole hidden states: its arguments, and variables assigned their sizes."""
    names = {argument.arg for argument in (*method.args.posonlyargs, *method.args.args, *method.args.kwonlyargs)}
    names.discard("self")
    for node in ast.walk(method):
        if isinstance(node, ast.Assign) and _is_size(node.value) and _root(node.value) in names:
            for target in node.targets:
                parts = target.elts if isinstance(target, ast.Tuple) else [target]
                names |= {part.id for part in parts if isinstance(part, ast.Name)}
    return names


def _is_size(node: ast.AST) -> bool:
    """Return True for `x.shape`, `x.size()` and an entry of either."""
    if isinstance(node, ast.Subscript):
        node = node.value
    if isinstance(node, ast.Call):
        node = node.func
    return isinstance(node, ast.Attribute) and node.attr in ("shape", "size")


def _root(node: ast.AST) -> str | None:
    """Return the name that an expression such as `x.shape[-1]` starts with."""
    while isinstance(node, (ast.Attribute, ast.Subscript, ast.Call)):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.id if isinstance(node, ast.Name) else None


QUERY: Final = re.compile(r"(^|_)(q|query|wq)(_|$)|^to_q$")
KEY: Final = re.compile(r"(^|_)(k|key|wk|v|value|wv)(_|$)|^to_[kv]$")
"""Names of projections of keys and of values."""
_SIZES: Final = ("head_dim", "attention_head_size", "key_value_proj_dim", "head_size", "d_head", "dim_head", "d_k")
_COUNTS: Final = ("n_head", "n_heads", "num_heads", "num_attention_heads", "heads", "nhead")
_KEY_COUNTS: Final = ("num_key_value_heads", "n_kv_heads", "n_kv_head", "num_kv_heads")
_WIDTHS: Final = ("inner_dim", "all_head_size", "split_size")
"""Attributes of attention modules with the width of all heads."""
_GROUPS: Final = "num_key_value_groups"
"""Attribute of attention modules with the number of query heads per key head."""


def role_of(name: str) -> Role | None:
    """Return the role of a projection by its name; None for other layers."""
    leaf = name.rpartition(".")[2]
    return "query" if QUERY.search(leaf) else "key" if KEY.search(leaf) else None


def holder_of(model: nn.Module, name: str) -> nn.Module:
    """Return the module that contains a layer."""
    return model.get_submodule(name.rpartition(".")[0])


def number(module: nn.Module, names: Sequence[str]) -> int | None:
    """Return the first of these attributes, of the module or its configuration, that is a positive integer."""
    for where in (module, getattr(module, "config", None)):
        for name in names:
            value = getattr(where, name, None)
            if isinstance(value, int) and value > 0:
                return value
    return None


def head_size(holder: nn.Module, width: int) -> int | None:
    """Return the head size of an attention module whose queries have `width` features; None if unknown."""
    size = number(holder, _SIZES)
    if size is not None and width % size == 0:
        return size
    count = number(holder, _COUNTS)
    return width // count if count is not None and width % count == 0 else None


def counts_heads(holder: nn.Module) -> bool:
    """Return True if a module has an instance attribute that counts heads."""
    return any(isinstance(vars(holder).get(name), int) for name in _COUNTS)


def share(model: nn.Module, split: LayerSplit, ranks: int) -> None:
    """Make several ranks compute the same key or value head if there are fewer such heads than ranks."""
    for _, size, layers in _attention(model, split):
        for name, role in layers.items():
            heads, rest = divmod(_width(model, split, name), size)
            spare = heads and not rest and heads % ranks and ranks % heads == 0
            if role == "key" and split.styles[name] == "colwise" and spare:
                split.styles[name] = "replicate_heads"
                split.numbers[name] = heads


def fit(model: nn.Module, split: LayerSplit, ranks: int) -> None:
    """Check that no head is split between ranks, and record the number of heads on one rank.

    Raises: ConfigError with sizes that work.
    """
    for parent, size, layers in _attention(model, split):
        for name in layers:
            heads, rest = divmod(_width(model, split, name), size)
            if not rest and heads % ranks and split.styles[name] != "replicate_heads":
                raise ConfigError(
                    f"tp_size={ranks} does not divide the {heads} heads of {name!r}; a head would be split. Set tp_size to one of "
                    f"{divisors(heads)}."
                )
        _divide(model, parent, layers, size, split, ranks)


def _attention(model: nn.Module, split: LayerSplit) -> Iterator[tuple[str, int, dict[str, Role]]]:
    """Yield each module with split projections, its head size, and those projections."""
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


def _width(model: nn.Module, split: LayerSplit, name: str) -> int:
    """Return the output features of one projection; a layer that joins several has a multiple of them."""
    sizes = matrix_of(model.get_submodule(name))
    return 0 if sizes is None else sizes.outputs // dict(BLOCKS).get(split.styles[name], 1)


def _divide(model: nn.Module, parent: str, layers: dict[str, Role], size: int, split: LayerSplit, ranks: int) -> None:
    """Record the per-rank values of an attention module's attributes that count heads."""
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
    """Return the reason that an attention module's code cannot run with fewer heads; None if it can."""
    for name in (*_COUNTS, *_KEY_COUNTS):
        if isinstance(vars(holder).get(name), int) and (use := use_of(holder, name)) in ("both", "unknown"):
            if use == "both":
                return (
                    f"{type(holder).__name__}.forward uses {name} as a number of heads and divides the width of all heads by "
                    "it; with view(batch, length, -1, head_dim) it could be split"
                )
            return f"the source of {type(holder).__name__}, which shows how {name} is used, is not available"
    return None


def per_head_tables(holder: nn.Module, heads: int) -> list[str]:
    """Return the embeddings of an attention module with one column per head, such as T5's relative positions."""
    return [n for n, m in holder.named_children() if isinstance(m, nn.Embedding) and m.embedding_dim == heads]


def per_head_tensor(holder: nn.Module, heads: int) -> str | None:
    """Return a parameter of an attention module, outside layers and norms, that has one entry per head."""
    for name, module in holder.named_modules():
        table = isinstance(module, nn.Embedding) and name in per_head_tables(holder, heads)
        if table or matrix_of(module) is not None or "Norm" in type(module).__name__:
            continue
        for leaf, parameter in module.named_parameters(recurse=False):
            if heads in parameter.shape:
                return f"{name}.{leaf}" if name else leaf
    return None


def norms_of_heads(model: nn.Module, split: LayerSplit) -> Iterator[str]:
    """Yield the norms of queries and keys beside split projections; such norms see this rank's heads only."""
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


def divide_named(model: nn.Module, split: LayerSplit, divide: Sequence[str], ranks: int) -> None:
    """Record per-rank values of the attributes in `tp_divide`. Raises: ConfigError for a name that no such module has."""
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
                    f"tp_size={ranks} does not divide {parent}.{name}={value}, which is listed in tp_divide; set tp_size to one of "
                    f"{divisors(value)}."
                )
            seen.add(name)
            split.attributes.setdefault(parent, {})[name] = value // ranks
    if missing := [name for name in divide if name not in seen]:
        raise ConfigError(
            f"tp_divide names {missing[0]!r}, but no module whose layers are split has an integer attribute of that name, so it would "
            "have no effect; check the spelling."
        )
