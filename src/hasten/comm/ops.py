"""Collectives on trees: gather, reduce, broadcast and pad nested structures of tensors.

Every operation starts with an exchange of a digest of its input. Ranks that must agree but do not raise MismatchError on every
rank with a table of their inputs, instead of a hang or garbage.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from hasten import trees
from hasten.comm.base import Comm, ReduceKind
from hasten.errors import CommError, MismatchError
from hasten.trees import Tree


def gather(tree: Tree, group_comm: Comm) -> Tree:
    """Return every rank's tensors concatenated along the first dimension; 0-dim tensors become rows."""
    if group_comm.size == 1:
        return trees.map_tensors(_as_rows, tree)
    _check_same_inputs("gather", tree, group_comm)
    return trees.map_tensors(
        lambda tensor: group_comm.all_gather(_as_rows(tensor)).flatten(0, 1), tree
    )


def gather_ragged(tree: Tree, group_comm: Comm) -> Tree:
    """Concatenate like `gather`, for ranks whose tensors differ in the size of the first dimension."""
    if group_comm.size == 1:
        return trees.map_tensors(_as_rows, tree)
    _check_same_inputs("gather_ragged", tree, group_comm, free_dim=0)
    sizes_by_tensor = iter(_sizes_of_ranks(tree, group_comm, 0))
    return trees.map_tensors(
        lambda tensor: _gather_rows(
            _as_rows(tensor), next(sizes_by_tensor), group_comm
        ),
        tree,
    )


def _gather_rows(tensor: Tensor, row_counts: Sequence[int], group_comm: Comm) -> Tensor:
    largest_size = max(row_counts)
    if min(row_counts) == largest_size:
        return group_comm.all_gather(tensor).flatten(0, 1)
    padded_tensor = tensor.new_zeros((largest_size, *tensor.shape[1:]))
    padded_tensor[: tensor.shape[0]] = tensor
    gathered_rows = group_comm.all_gather(padded_tensor)
    return torch.cat(
        [
            rank_rows[:num_rows]
            for rank_rows, num_rows in zip(gathered_rows, row_counts, strict=True)
        ]
    )


def reduce(
    tree: Tree, group_comm: Comm, kind: ReduceKind = "sum", scale: float = 1.0
) -> Tree:
    """Return every tensor reduced over the ranks by sum, mean, min or max, times `scale`."""
    if kind not in ("sum", "mean", "min", "max"):
        raise CommError(
            f"reduce kind {kind!r} is unknown; use one of 'sum', 'mean', 'min', 'max'."
        )
    if kind in ("min", "max") and any(
        tensor.is_complex() for tensor in trees.tensors(tree)
    ):
        raise CommError(
            f"{kind} of complex tensors has no meaning; reduce their absolute values instead."
        )
    _check_same_inputs(f"reduce {kind}", tree, group_comm)
    if scale == 1.0:
        return trees.map_tensors(
            lambda tensor: group_comm.all_reduce(tensor, kind), tree
        )
    return trees.map_tensors(
        lambda tensor: group_comm.all_reduce(tensor, kind) * scale, tree
    )


def broadcast(tree: Tree, group_comm: Comm, src: int = 0) -> Tree:
    """Return the tensors of rank `src`; every rank must pass tensors of the same shapes."""
    _check_same_inputs(f"broadcast from {src}", tree, group_comm)
    return trees.map_tensors(lambda tensor: group_comm.broadcast(tensor, src), tree)


def pad_across(
    tree: Tree,
    group_comm: Comm,
    dim: int = 0,
    pad_index: float = 0,
    pad_first: bool = False,
) -> Tree:
    """Return every tensor padded with `pad_index` along `dim` to the largest size on any rank."""
    _check_same_inputs(f"pad_across dim {dim}", tree, group_comm, any_shape=True)
    sizes_by_tensor = iter(_sizes_of_ranks(tree, group_comm, dim))

    def pad_tensor(tensor: Tensor) -> Tensor:
        largest_size = max(next(sizes_by_tensor))
        if not -tensor.ndim <= dim < tensor.ndim or tensor.shape[dim] == largest_size:
            return tensor
        padded_shape = list(tensor.shape)
        padded_shape[dim] = largest_size
        padded_tensor = tensor.new_full(padded_shape, pad_index)
        start_index = largest_size - tensor.shape[dim] if pad_first else 0
        padded_tensor.narrow(dim, start_index, tensor.shape[dim]).copy_(tensor)
        return padded_tensor

    return trees.map_tensors(pad_tensor, tree)


def gather_object(
    python_object: Any, group_comm: Comm
) -> list[Any]:  # Any: the caller's objects
    """Return a list of every rank's object; if every rank passes a list, the concatenated lists."""
    gathered_objects = group_comm.all_gather_object(python_object)
    if all(isinstance(rank_object, list) for rank_object in gathered_objects):
        return list(chain.from_iterable(gathered_objects))
    return gathered_objects


# Any: the caller's objects
def broadcast_object_list(
    objects: list[Any], group_comm: Comm, src: int = 0
) -> list[Any]:
    """Return the list with its items replaced in place by those of rank `src`."""
    objects[:] = group_comm.broadcast_object(objects, src)
    return objects


def _as_rows(tensor: Tensor) -> Tensor:
    return tensor.reshape(1) if tensor.ndim == 0 else tensor


def _check_same_inputs(
    op_name: str,
    tree: Tree,
    group_comm: Comm,
    free_dim: int | None = None,
    any_shape: bool = False,
) -> None:
    """Raise unless all ranks pass the same structure; sizes may differ along `free_dim`, or with `any_shape` along all.

    Raises: MismatchError on every rank. Ranks: every rank.
    """
    if group_comm.size == 1:
        return
    input_description = _describe_input(op_name, tree, free_dim, any_shape)
    local_digest = hashlib.blake2b(input_description.encode(), digest_size=8).digest()
    rank_digests = group_comm.all_gather(
        torch.frombuffer(bytearray(local_digest), dtype=torch.int64)
    )
    if (rank_digests != rank_digests[0]).any():
        descriptions = group_comm.all_gather_object(_describe_input(op_name, tree))
        raise _mismatch_error(op_name, descriptions, group_comm)


def _sizes_of_ranks(tree: Tree, group_comm: Comm, dim: int) -> list[list[int]]:
    """Return every rank's size along `dim`, for each tensor."""
    local_sizes = [_size_along(tensor, dim) for tensor in trees.tensors(tree)]
    rank_sizes = group_comm.all_gather(torch.tensor(local_sizes, dtype=torch.int64))
    sizes_by_tensor: list[list[int]] = rank_sizes.T.tolist()
    return sizes_by_tensor


def _size_along(tensor: Tensor, dim: int) -> int:
    if -tensor.ndim <= dim < tensor.ndim:
        return int(tensor.shape[dim])
    return 1


def _describe_input(
    op_name: str, tree: Tree, free_dim: int | None = None, any_shape: bool = False
) -> str:
    description_lines = [op_name]
    for leaf_path, leaf in trees.paths(tree):
        if not isinstance(leaf, Tensor):
            continue
        shown_shape = list(_as_rows(leaf).shape if free_dim == 0 else leaf.shape)
        if free_dim is not None and -len(shown_shape) <= free_dim < len(shown_shape):
            shown_shape[free_dim] = -1
        if any_shape:
            shown_shape = [-1] * len(shown_shape)
        tensor_name = ".".join(map(str, leaf_path)) or "tensor"
        description_lines.append(
            f"{tensor_name}: {shown_shape} {str(leaf.dtype).removeprefix('torch.')}"
        )
    return "\n".join(description_lines)


def _mismatch_error(
    op_name: str, descriptions: Sequence[str], group_comm: Comm
) -> MismatchError:
    table_rows = []
    for member_position, rank_description in enumerate(descriptions):
        called_op, *tensor_lines = rank_description.split("\n")
        table_rows.append(
            f"  rank {group_comm.ranks[member_position]}: {called_op} of "
            + ("; ".join(tensor_lines) or "no tensor")
        )
    return MismatchError(
        f"{op_name}: the ranks pass different inputs, so the result would be garbage or a hang.\n"
        + "\n".join(table_rows)
        + "\nPass equal structures, shapes and dtypes on every rank; for rows that differ in number use "
        "gather_for_metrics or a ragged gather, or pad_across_processes first."
    )
