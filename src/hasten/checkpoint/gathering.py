"""Whole tensors from slices, for checkpoints that are to hold full weights instead of shards."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from hasten.checkpoint.base import Component, Slice, StateTree
from hasten.checkpoint.rank_agreement import Agreement, agreeing
from hasten.comm.base import Comm


@dataclass(frozen=True, slots=True)
class _Piece:
    """Where a rank's slice lies, told to the others ahead of the data."""

    offset: tuple[int, ...]
    extent: tuple[int, ...]
    owned: bool
    address: int


def gathered(tree: StateTree, comm: Comm, keeps: bool) -> StateTree:
    """The tree with every sliced tensor whole on the ranks that keep it; others hold placeholders without memory.

    One tensor travels at a time. Ranks: every rank; `keeps` on those that will write.
    """
    made: dict[str, Component] = {}
    with agreeing(comm, "gathering whole tensors") as together:
        for name, component in tree.components.items():
            whole = component.sliced and not component.per_rank
            made[name] = _joined(component, together, keeps) if whole else component
        return StateTree(made)


def _joined(component: Component, together: Agreement, keeps: bool) -> Component:
    told: list[dict[str, _Piece]] = together.share(
        {
            key: _Piece(value.offset, tuple(value.data.shape), value.owned, value.data.data_ptr())
            for key, value in component.tensors.items()
            if isinstance(value, Slice)
        }
    )
    made: dict[tuple[object, ...], Tensor] = {}
    tensors: dict[str, Tensor | Slice] = {}
    for key, value in component.tensors.items():
        if not isinstance(value, Slice):
            tensors[key] = value
            continue
        pieces = [rank[key] for rank in told]
        same = (*value.shape, *(piece.address for piece in pieces))  # tied weights stay one tensor under two names
        if not any(piece.address for piece in pieces) or same not in made:
            made[same] = _assemble(value, pieces, together, keeps)
        tensors[key] = made[same]
    return replace(component, tensors=tensors, main_only=frozenset(tensors))


def _assemble(mine: Slice, pieces: list[_Piece], together: Agreement, keeps: bool) -> Tensor:
    most = max(torch.Size(piece.extent).numel() for piece in pieces)
    flat = mine.data.new_zeros(most)
    flat[: mine.data.numel()] = mine.data.reshape(-1)
    together.share()  # every rank has its part ready
    parts = together.comm.all_gather(flat)
    if not keeps:
        return torch.zeros((), dtype=mine.data.dtype).expand(mine.shape)
    whole = torch.empty(mine.shape, dtype=mine.data.dtype)
    for piece, part in zip(pieces, parts, strict=True):
        if not piece.owned:
            continue
        target = whole
        for dim, (start, size) in enumerate(zip(piece.offset, piece.extent, strict=True)):
            target = target.narrow(dim, start, size)
        target.copy_(part[: target.numel()].reshape(piece.extent))
    return whole
