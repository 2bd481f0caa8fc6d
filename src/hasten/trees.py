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
        field_names = getattr(tree, "_fields", None)
        if field_names:
            return list(zip(field_names, tree, strict=True))
        return list(enumerate(tree))
    return [
        (field.name, getattr(tree, field.name)) for field in dataclasses.fields(tree)
    ]


def rebuild(tree: Tree, new_children: Sequence[Tree]) -> Tree:
    """Return a container like `tree` with `parts` in place of its children, in the same order."""
    if isinstance(tree, (Mapping, UserDict)):
        return _rebuild_mapping(tree, new_children)
    if isinstance(tree, tuple):
        if hasattr(tree, "_fields"):
            return type(tree)(*new_children)
        return type(tree)(new_children)
    if isinstance(tree, list):
        return type(tree)(new_children)
    return _rebuild_dataclass(tree, new_children)


def _rebuild_mapping(tree: Any, new_children: Sequence[Tree]) -> Tree:
    children_by_key = dict(zip(tree, new_children, strict=True))
    if type(tree) is dict:
        return children_by_key
    # ModelOutput: an OrderedDict whose keys are also fields
    if dataclasses.is_dataclass(tree):
        make: Callable[..., Tree] = type(tree)
        return make(**children_by_key)
    # keeps default factories and extra attributes of dict subclasses
    new_mapping = copy.copy(tree)
    if not hasattr(new_mapping, "__setitem__"):
        return children_by_key
    for key, new_child in children_by_key.items():
        new_mapping[key] = new_child
    return new_mapping


def _rebuild_dataclass(tree: Tree, new_children: Sequence[Tree]) -> Tree:
    # __init__ may require arguments that are not stored in fields
    new_instance = copy.copy(tree)
    for field, new_child in zip(dataclasses.fields(tree), new_children, strict=True):
        object.__setattr__(new_instance, field.name, new_child)
    return new_instance


def map_leaves(fn: Callable[[Any], Any], tree: Tree) -> Tree:
    """Return the same tree with `fn` applied to every leaf, tensors and plain values alike."""
    if isinstance(tree, Tensor) or not is_container(tree):
        return fn(tree)
    return rebuild(tree, [map_leaves(fn, child) for _, child in children(tree)])


def map_tensors(fn: Callable[[Tensor], Any], tree: Tree) -> Tree:
    """Return the same tree with `fn` applied to every tensor; other leaves are unchanged."""
    if isinstance(tree, Tensor):
        return fn(tree)
    if not is_container(tree):
        return tree
    return rebuild(tree, [map_tensors(fn, child) for _, child in children(tree)])


def zip_tensors(fn: Callable[..., Any], first: Tree, *others: Tree) -> Tree:
    """Return the tree of `first` with `fn(a, b, ...)` applied to the tensors at the same path of every tree."""
    if isinstance(first, Tensor):
        return fn(first, *others)
    if not is_container(first):
        return first
    child_rows = zip(
        *([child for _, child in children(tree)] for tree in (first, *others)),
        strict=True,
    )
    return rebuild(first, [zip_tensors(fn, *child_row) for child_row in child_rows])


def paths(tree: Tree, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Yield every leaf with its path of keys."""
    if isinstance(tree, Tensor) or not is_container(tree):
        yield path, tree
        return
    for key, child in children(tree):
        yield from paths(child, (*path, key))


def leaves(tree: Tree) -> list[Any]:
    """Return every leaf, in order."""
    tree_leaves: list[Any] = []
    _collect_leaves(tree, tree_leaves)
    return tree_leaves


def _collect_leaves(tree: Tree, tree_leaves: list[Any]) -> None:
    if isinstance(tree, Tensor) or not is_container(tree):
        tree_leaves.append(tree)
        return
    for child in _child_values(tree):
        if type(child) is Tensor:  # the common leaf, without a recursive call
            tree_leaves.append(child)
        else:
            _collect_leaves(child, tree_leaves)


def _child_values(tree: Tree) -> Collection[Tree]:
    """Return the children of one container, without their keys."""
    tree_type = type(tree)
    if tree_type is tuple or tree_type is list:
        return tree  # type: ignore[no-any-return]  # a tuple or list, by its type
    if tree_type is dict:
        return tree.values()  # type: ignore[no-any-return]  # a dict's, by its type
    return [child for _, child in children(tree)]


def tensors(tree: Tree) -> list[Tensor]:
    """Return every tensor, in order."""
    return [leaf for leaf in leaves(tree) if isinstance(leaf, Tensor)]


def replace_tensors(tree: Tree, fresh: Sequence[Tensor]) -> Tree:
    """Return the same tree with its tensors replaced by `fresh`, in order."""
    new_tensors = iter(fresh)
    return map_tensors(lambda _: next(new_tensors), tree)


def to_device(
    tree: Tree,
    device: torch.device | str,
    non_blocking: bool = False,
    skip_keys: Collection[str] = (),
) -> Tree:
    """Return the tree with tensors, and other objects that have `.to`, on `device`; values under `skip_keys` are not moved."""
    if isinstance(tree, Tensor):
        return tree.to(device, non_blocking=non_blocking)
    tree_type = type(tree)
    # the common batches, on the hot path
    if not skip_keys and (tree_type is dict or tree_type is tuple or tree_type is list):
        moved_children = [
            child.to(device, non_blocking=non_blocking)
            if type(child) is Tensor
            else to_device(child, device, non_blocking)
            for child in (tree.values() if tree_type is dict else tree)
        ]
        if tree_type is list:
            return moved_children
        if tree_type is tuple:
            return tuple(moved_children)
        return dict(zip(tree, moved_children, strict=True))
    if hasattr(tree, "to") or isinstance(tree, UserDict) or not is_container(tree):
        return _move_object(tree, device, non_blocking, skip_keys)
    return rebuild(
        tree,
        [
            child
            if key in skip_keys
            else to_device(child, device, non_blocking, skip_keys)
            for key, child in children(tree)
        ],
    )


def _move_object(
    movable: Any,
    device: torch.device | str,
    non_blocking: bool,
    skip_keys: Collection[str],
) -> Any:  # Any: a batch object of a user's class
    if isinstance(movable, UserDict) and (skip_keys or not hasattr(movable, "to")):
        return rebuild(
            movable,
            [
                child
                if key in skip_keys
                else to_device(child, device, non_blocking, skip_keys)
                for key, child in movable.items()
            ],
        )
    move_method = getattr(movable, "to", None)
    if not callable(move_method) or isinstance(movable, (torch.nn.Module, type)):
        return movable
    try:
        return move_method(device, non_blocking=non_blocking)
    # a `.to` without the argument non_blocking: the plain move is just as correct
    except TypeError:
        return move_method(device)


def batch_size(tree: Tree) -> int | None:
    """Return the number of rows of the first tensor that has rows, or None if no tensor has any."""
    for leaf in leaves(tree):
        if isinstance(leaf, Tensor) and leaf.ndim:
            return int(leaf.shape[0])
    return None


def slice_rows(tree: Tree, rows: slice, size: int | None = None) -> Tree:
    """Return the tree with each tensor sliced to `rows`; with `size`, only tensors that have `size` rows are sliced."""

    def take(x: Tensor) -> Tensor:
        if x.ndim and (size is None or x.shape[0] == size):
            return x[rows]
        return x

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
    half_dtypes = (torch.float16, torch.bfloat16)
    return map_tensors(lambda x: x.float() if x.dtype in half_dtypes else x, tree)
