"""How an attention module uses the attribute that counts its heads, read from its source: as a shape or as a divisor."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator
from functools import lru_cache
from typing import Literal

from torch import nn

Use = Literal["unused", "shape", "divisor", "both", "unknown"]
"""`shape`: the count must be that of one rank. `divisor`: it divides the width of all heads and must stay. `both`: it would
have to be both at once."""


def use_of(holder: nn.Module, attribute: str) -> Use:
    """Return how the methods of a module use one of its attributes after the module was built."""
    return _use(type(holder), attribute)  # type: ignore[arg-type]  # mypy asks the instances of a class for its hash


@lru_cache(maxsize=64)  # asked for every block of a model, and Python parses a class's whole file for its source
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
    except (OSError, TypeError, SyntaxError):  # a class without a file, such as one made in a console
        return None


def _methods(kind: type) -> list[ast.FunctionDef] | None:
    """Return the methods a module of this class runs, inherited ones included; None where a source is not there."""
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
    """Return the names of a forward's arguments and of what their sizes are assigned to: those of whole hidden states."""
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
    """Return the name an expression such as `x.shape[-1]` begins with."""
    while isinstance(node, (ast.Attribute, ast.Subscript, ast.Call)):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.id if isinstance(node, ast.Name) else None
