"""Collectives on trees: gather, reduce, broadcast and pad nested structures of tensors.

Every operation starts with an exchange of a digest of its input. Ranks that must agree but do not raise MismatchError on every
rank with a table of their inputs, instead of a hang or garbage.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hasten import trees
from hasten.comm.base import Comm, ReduceKind
from hasten.errors import CommError, MismatchError
from hasten.trees import Tree


def gather(tree: Tree, comm: Comm) -> Tree:
    """Return every rank's tensors concatenated along the first dimension; 0-dim tensors become rows."""
    if comm.size == 1:
        return trees.map_tensors(_rows, tree)
    _check_alike("gather", tree, comm)
    return trees.map_tensors(lambda x: comm.all_gather(_rows(x)).flatten(0, 1), tree)


def gather_ragged(tree: Tree, comm: Comm) -> Tree:
    """Concatenate like `gather`, for ranks whose tensors differ in the size of the first dimension."""
    if comm.size == 1:
        return trees.map_tensors(_rows, tree)
    _check_alike("gather_ragged", tree, comm, free_dim=0)
    sizes = iter(_sizes_of_ranks(tree, comm, 0))
    return trees.map_tensors(lambda x: _gather_rows(_rows(x), next(sizes), comm), tree)


def _gather_rows(x: Tensor, sizes: Sequence[int], comm: Comm) -> Tensor:
    largest_size = max(sizes)
    if min(sizes) == largest_size:
        return comm.all_gather(x).flatten(0, 1)
    padded = x.new_zeros((largest_size, *x.shape[1:]))
    padded[: x.shape[0]] = x
    gathered = comm.all_gather(padded)
    return torch.cat([rows[:size] for rows, size in zip(gathered, sizes, strict=True)])


def reduce(
    tree: Tree, comm: Comm, kind: ReduceKind = "sum", scale: float = 1.0
) -> Tree:
    """Return every tensor reduced over the ranks by sum, mean, min or max, times `scale`."""
    if kind not in ("sum", "mean", "min", "max"):
        raise CommError(
            f"reduce kind {kind!r} is unknown; use one of 'sum', 'mean', 'min', 'max'."
        )
    if kind in ("min", "max") and any(x.is_complex() for x in trees.tensors(tree)):
        raise CommError(
            f"{kind} of complex tensors has no meaning; reduce their absolute values instead."
        )
    _check_alike(f"reduce {kind}", tree, comm)
    if scale == 1.0:
        return trees.map_tensors(lambda x: comm.all_reduce(x, kind), tree)
    return trees.map_tensors(lambda x: comm.all_reduce(x, kind) * scale, tree)


def broadcast(tree: Tree, comm: Comm, src: int = 0) -> Tree:
    """Return the tensors of rank `src`; every rank must pass tensors of the same shapes."""
    _check_alike(f"broadcast from {src}", tree, comm)
    return trees.map_tensors(lambda x: comm.broadcast(x, src), tree)


def pad_across(
    tree: Tree, comm: Comm, dim: int = 0, pad_index: float = 0, pad_first: bool = False
) -> Tree:
    """Return every tensor padded with `pad_index` along `dim` to the largest size on any rank."""
    _check_alike(f"pad_across dim {dim}", tree, comm, any_shape=True)
    sizes = iter(_sizes_of_ranks(tree, comm, dim))

    def pad(x: Tensor) -> Tensor:
        largest_size = max(next(sizes))
        if not -x.ndim <= dim < x.ndim or x.shape[dim] == largest_size:
            return x
        shape = list(x.shape)
        shape[dim] = largest_size
        padded = x.new_full(shape, pad_index)
        start = largest_size - x.shape[dim] if pad_first else 0
        padded.narrow(dim, start, x.shape[dim]).copy_(x)
        return padded

    return trees.map_tensors(pad, tree)


def gather_object(obj: Any, comm: Comm) -> list[Any]:  # Any: the caller's objects
    """Return a list of every rank's object; if every rank passes a list, the concatenated lists."""
    gathered = comm.all_gather_object(obj)
    if all(isinstance(part, list) for part in gathered):
        return [item for part in gathered for item in part]
    return gathered


# Any: the caller's objects
def broadcast_object_list(objects: list[Any], comm: Comm, src: int = 0) -> list[Any]:
    """Return the list with its items replaced in place by those of rank `src`."""
    objects[:] = comm.broadcast_object(objects, src)
    return objects


def _rows(x: Tensor) -> Tensor:
    return x.reshape(1) if x.ndim == 0 else x


def _check_alike(
    op: str,
    tree: Tree,
    comm: Comm,
    free_dim: int | None = None,
    any_shape: bool = False,
) -> None:
    """Raise unless all ranks pass the same structure; sizes may differ along `free_dim`, or with `any_shape` along all.

    Raises: MismatchError on every rank. Ranks: every rank.
    """
    if comm.size == 1:
        return
    description = _describe(op, tree, free_dim, any_shape)
    digest = hashlib.blake2b(description.encode(), digest_size=8).digest()
    digests = comm.all_gather(torch.frombuffer(bytearray(digest), dtype=torch.int64))
    if (digests != digests[0]).any():
        shown = comm.all_gather_object(_describe(op, tree))
        raise _mismatch(op, shown, comm)


def _sizes_of_ranks(tree: Tree, comm: Comm, dim: int) -> list[list[int]]:
    """Return every rank's size along `dim`, for each tensor."""
    sizes = [_size(x, dim) for x in trees.tensors(tree)]
    gathered = comm.all_gather(torch.tensor(sizes, dtype=torch.int64))
    sizes_by_tensor: list[list[int]] = gathered.T.tolist()
    return sizes_by_tensor


def _size(x: Tensor, dim: int) -> int:
    return int(x.shape[dim]) if -x.ndim <= dim < x.ndim else 1


def _describe(
    op: str, tree: Tree, free_dim: int | None = None, any_shape: bool = False
) -> str:
    lines = [op]
    for path, leaf in trees.paths(tree):
        if not isinstance(leaf, Tensor):
            continue
        shape = list(_rows(leaf).shape if free_dim == 0 else leaf.shape)
        if free_dim is not None and -len(shape) <= free_dim < len(shape):
            shape[free_dim] = -1
        if any_shape:
            shape = [-1] * len(shape)
        name = ".".join(map(str, path)) or "tensor"
        lines.append(f"{name}: {shape} {str(leaf.dtype).removeprefix('torch.')}")
    return "\n".join(lines)


def _mismatch(op: str, descriptions: Sequence[str], comm: Comm) -> MismatchError:
    rows = []
    for member, text in enumerate(descriptions):
        called, *lines = text.split("\n")
        rows.append(
            f"  rank {comm.ranks[member]}: {called} of "
            + ("; ".join(lines) or "no tensor")
        )
    return MismatchError(
        f"{op}: the ranks pass different inputs, so the result would be garbage or a hang.\n"
        + "\n".join(rows)
        + "\nPass equal structures, shapes and dtypes on every rank; for rows that differ in number use "
        "gather_for_metrics or a ragged gather, or pad_across_processes first."
    )
