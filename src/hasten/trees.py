"""Map, zip, slice and move nested containers of tensors.

A tree is a tensor, a container of trees, or any other value. Containers are mappings (dict and its subclasses,
`ModelOutput`, `UserDict` kinds), lists, tuples, named tuples and dataclass instances. Everything else is a leaf, which
is returned unchanged.
"""

from __future__ import annotations

import copy
import dataclasses
from collections import UserDict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

# any nesting of containers around tensors and plain values; Python cannot express the recursion usefully
Tree = Any
Path = tuple[str | int, ...]


def is_container(value: object) -> bool:
    """Return whether `value` is a container of trees rather than a leaf."""
    return isinstance(value, (dict, list, tuple, Mapping)) or (
        dataclasses.is_dataclass(value) and not isinstance(value, (type, Tensor))
    )


def children(tree: Tree) -> list[tuple[str | int, Tree]]:
    """Return the children of one container with their keys, in a fixed order."""
    if isinstance(tree, Mapping):
        return list(tree.items())
    if isinstance(tree, (list, tuple)):
        names = getattr(tree, "_fields", None)
        return list(zip(names, tree, strict=True)) if names else list(enumerate(tree))
    return [
        (field.name, getattr(tree, field.name)) for field in dataclasses.fields(tree)
    ]


def rebuild(tree: Tree, parts: Sequence[Tree]) -> Tree:
    """Return a container like `tree` with `parts` in place of its children, in the same order."""
    if isinstance(tree, (Mapping, UserDict)):
        return _rebuild_mapping(tree, parts)
    if isinstance(tree, tuple):
        return type(tree)(*parts) if hasattr(tree, "_fields") else type(tree)(parts)
    if isinstance(tree, list):
        return type(tree)(parts)
    return _rebuild_dataclass(tree, parts)


def _rebuild_mapping(tree: Any, parts: Sequence[Tree]) -> Tree:
    named = dict(zip(tree, parts, strict=True))
    if type(tree) is dict:
        return named
    # ModelOutput: an OrderedDict whose keys are also fields
    if dataclasses.is_dataclass(tree):
        make: Callable[..., Tree] = type(tree)
        return make(**named)
    # keeps default factories and extra attributes of dict subclasses
    fresh = copy.copy(tree)
    if not hasattr(fresh, "__setitem__"):
        return named
    for key, part in named.items():
        fresh[key] = part
    return fresh


def _rebuild_dataclass(tree: Tree, parts: Sequence[Tree]) -> Tree:
    # __init__ may require arguments that are not stored in fields
    fresh = copy.copy(tree)
    for field, part in zip(dataclasses.fields(tree), parts, strict=True):
        object.__setattr__(fresh, field.name, part)
    return fresh


def map_leaves(fn: Callable[[Any], Any], tree: Tree) -> Tree:
    """Return the same tree with `fn` applied to every leaf, tensors and plain values alike."""
    if isinstance(tree, Tensor) or not is_container(tree):
        return fn(tree)
    return rebuild(tree, [map_leaves(fn, part) for _, part in children(tree)])


def map_tensors(fn: Callable[[Tensor], Any], tree: Tree) -> Tree:
    """Return the same tree with `fn` applied to every tensor; other leaves are unchanged."""
    if isinstance(tree, Tensor):
        return fn(tree)
    if not is_container(tree):
        return tree
    return rebuild(tree, [map_tensors(fn, part) for _, part in children(tree)])


def zip_tensors(fn: Callable[..., Any], first: Tree, *others: Tree) -> Tree:
    """Return the tree of `first` with `fn(a, b, ...)` applied to the tensors at the same path of every tree."""
    if isinstance(first, Tensor):
        return fn(first, *others)
    if not is_container(first):
        return first
    rows = zip(
        *([part for _, part in children(tree)] for tree in (first, *others)),
        strict=True,
    )
    return rebuild(first, [zip_tensors(fn, *row) for row in rows])


def paths(tree: Tree, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Yield every leaf with its path of keys."""
    if isinstance(tree, Tensor) or not is_container(tree):
        yield path, tree
        return
    for key, part in children(tree):
        yield from paths(part, (*path, key))


def leaves(tree: Tree) -> list[Any]:
    """Return every leaf, in order."""
    found: list[Any] = []
    _collect(tree, found)
    return found


def _collect(tree: Tree, found: list[Any]) -> None:
    if isinstance(tree, Tensor) or not is_container(tree):
        found.append(tree)
        return
    for part in _parts(tree):
        if type(part) is Tensor:  # the common leaf, without a recursive call
            found.append(part)
        else:
            _collect(part, found)


def _parts(tree: Tree) -> Collection[Tree]:
    """Return the children of one container, without their keys."""
    kind = type(tree)
    if kind is tuple or kind is list:
        return tree  # type: ignore[no-any-return]  # a tuple or list, by its type
    if kind is dict:
        return tree.values()  # type: ignore[no-any-return]  # a dict's, by its type
    return [part for _, part in children(tree)]


def tensors(tree: Tree) -> list[Tensor]:
    """Return every tensor, in order."""
    return [leaf for leaf in leaves(tree) if isinstance(leaf, Tensor)]


def replace_tensors(tree: Tree, fresh: Sequence[Tensor]) -> Tree:
    """Return the same tree with its tensors replaced by `fresh`, in order."""
    source = iter(fresh)
    return map_tensors(lambda _: next(source), tree)


def to_device(
    tree: Tree,
    device: torch.device | str,
    non_blocking: bool = False,
    skip_keys: Collection[str] = (),
) -> Tree:
    """Return the tree with tensors, and other objects that have `.to`, on `device`; values under `skip_keys` are not moved."""
    if isinstance(tree, Tensor):
        return tree.to(device, non_blocking=non_blocking)
    kind = type(tree)
    # the common batches, on the hot path
    if not skip_keys and (kind is dict or kind is tuple or kind is list):
        moved = [
            part.to(device, non_blocking=non_blocking)
            if type(part) is Tensor
            else to_device(part, device, non_blocking)
            for part in (tree.values() if kind is dict else tree)
        ]
        if kind is list:
            return moved
        return tuple(moved) if kind is tuple else dict(zip(tree, moved, strict=True))
    if hasattr(tree, "to") or isinstance(tree, UserDict) or not is_container(tree):
        return _move_object(tree, device, non_blocking, skip_keys)
    return rebuild(
        tree,
        [
            part
            if key in skip_keys
            else to_device(part, device, non_blocking, skip_keys)
            for key, part in children(tree)
        ],
    )


def _move_object(
    value: Any,
    device: torch.device | str,
    non_blocking: bool,
    skip_keys: Collection[str],
) -> Any:  # Any: a batch object of a user's class
    if isinstance(value, UserDict) and (skip_keys or not hasattr(value, "to")):
        return rebuild(
            value,
            [
                part
                if key in skip_keys
                else to_device(part, device, non_blocking, skip_keys)
                for key, part in value.items()
            ],
        )
    move = getattr(value, "to", None)
    if not callable(move) or isinstance(value, (torch.nn.Module, type)):
        return value
    try:
        return move(device, non_blocking=non_blocking)
    # a `.to` without the argument non_blocking: the plain move is just as correct
    except TypeError:
        return move(device)


def batch_size(tree: Tree) -> int | None:
    """Return the number of rows of the first tensor that has rows, or None if no tensor has any."""
    for leaf in leaves(tree):
        if isinstance(leaf, Tensor) and leaf.ndim:
            return int(leaf.shape[0])
    return None


def slice_rows(tree: Tree, rows: slice, size: int | None = None) -> Tree:
    """Return the tree with each tensor sliced to `rows`; with `size`, only tensors that have `size` rows are sliced."""

    def take(x: Tensor) -> Tensor:
        return x[rows] if x.ndim and (size is None or x.shape[0] == size) else x

    return map_tensors(take, tree)


def concat(trees: Sequence[Tree], dim: int = 0) -> Tree:
    """Return one tree whose tensors are those of the given trees concatenated along `dim`; 0-dim tensors become rows."""
    if len(trees) == 1:
        return trees[0]
    return zip_tensors(
        lambda *parts: torch.cat(
            [p.reshape(1) if p.ndim == 0 else p for p in parts], dim
        ),
        *trees,
    )


def to_fp32(tree: Tree) -> Tree:
    """Return the tree with half-precision tensors converted to float32."""
    half = (torch.float16, torch.bfloat16)
    return map_tensors(lambda x: x.float() if x.dtype in half else x, tree)
