"""Attention over a sequence of which each rank holds a part: keys gathered, keys around a ring, or heads exchanged."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from hasten.strategies.context.blocks import Block, attend, attend_backward, merge
from hasten.strategies.context.layout import SequenceLayout
from hasten.strategies.context.ops import Rotation, all_parts, summed_part

Exchange = Literal["gather", "ring"]


@dataclass(frozen=True, slots=True)
class Sharing:
    """Who shares a sequence, how it is laid out, and how keys and values travel."""

    group: dist.ProcessGroup
    layout: SequenceLayout
    exchange: Exchange


@dataclass(frozen=True, slots=True)
class Manner:
    """How queries attend to keys."""

    causal: bool
    scale: float


def blockwise(query: Tensor, key: Tensor, value: Tensor, sharing: Sharing, manner: Manner) -> Tensor:
    """The output for this rank's queries over every rank's keys, without ever holding all scores. Ranks: the group.

    Tensors are (batch, heads, length, width); keys and values may have fewer heads, each shared by several queries.
    """
    made: Tensor = _Blockwise.apply(query, key, value, sharing, manner)  # type: ignore[no-untyped-call]  # as torch is
    return made


class _Blockwise(torch.autograd.Function):
    # Any: the context and the gradients of torch.autograd.Function, which torch leaves untyped.

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, sharing: Sharing, manner: Manner) -> Tensor:
        ctx.sharing, ctx.manner = sharing, manner
        rank, layout = sharing.group.rank(), sharing.layout
        made: dict[int, tuple[Tensor, Tensor]] = {}
        for other, keys, values in _visits(key, value, sharing):
            for place in _places(layout, rank, other, manner.causal, query, keys):
                more = attend(_block(query, keys, values, place, manner))
                made[place.row] = merge(*made[place.row], *more) if place.row in made else more
        outs, sums = zip(*(made[row] for row in sorted(made)), strict=True)
        whole, lse = _joined(outs).to(query.dtype), _joined(sums, -1)
        ctx.save_for_backward(query, key, value, whole, lse)
        return whole

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        query, key, value, out, lse = ctx.saved_tensors
        sharing, manner = ctx.sharing, ctx.manner
        rank, layout = sharing.group.rank(), sharing.layout
        chunks = layout.chunks_per_rank if manner.causal else 1
        dq = _Chunks(query, chunks)
        home = _Returning(sharing)
        for other, keys, values in _visits(key, value, sharing):
            dk, dv = _Chunks(keys, chunks), _Chunks(values, chunks)
            for place in _places(layout, rank, other, manner.causal, query, keys):
                block = _block(query, keys, values, place, manner)
                handed, made = _strided(grad[..., place.rows, :]), _strided(out[..., place.rows, :])
                more_q, more_k, more_v = attend_backward(block, handed, made, lse[..., place.rows].contiguous())
                dq.add(place.row, more_q)
                dk.add(place.column, _fold_heads(more_k, key.shape[-3]))
                dv.add(place.column, _fold_heads(more_v, key.shape[-3]))
            home.add(other, dk.joined(), dv.joined())
        own_k, own_v = home.result()
        return dq.joined().to(query.dtype), own_k.to(key.dtype), own_v.to(value.dtype), None, None


@dataclass(frozen=True, slots=True)
class _Place:
    """A chunk of queries and a chunk of keys that attend to each other, by number and as slices."""

    row: int
    rows: slice
    column: int
    columns: slice
    causal: bool
    """The causal mask acts inside the block."""


def _places(
    layout: SequenceLayout, rank: int, other: int, causal: bool, query: Tensor, key: Tensor
) -> Iterator[_Place]:
    """The blocks of this rank's queries with the keys of rank `other`."""
    if not causal:
        yield _Place(0, slice(None), 0, slice(None), False)
        return
    row, column = query.shape[-2] // layout.chunks_per_rank, key.shape[-2] // layout.chunks_per_rank
    for pair in layout.pairs(rank, other, causal):
        rows = slice(pair.query * row, (pair.query + 1) * row)
        yield _Place(pair.query, rows, pair.key, slice(pair.key * column, (pair.key + 1) * column), pair.diagonal)


class _Chunks:
    """The chunks of a gradient, each the sum of what blocks add to it; sums of several are kept in float32."""

    def __init__(self, like: Tensor, number: int) -> None:
        self._like = like
        self._made: list[Tensor | None] = [None] * number

    def add(self, number: int, more: Tensor) -> None:
        so_far = self._made[number]
        self._made[number] = more if so_far is None else so_far.float().add_(more)

    def joined(self) -> Tensor:
        """The whole gradient; zero where nothing was added."""
        shape = (*self._like.shape[:-2], self._like.shape[-2] // len(self._made), self._like.shape[-1])
        return _joined([self._like.new_zeros(shape) if made is None else made for made in self._made])


def _joined(chunks: Sequence[Tensor], dim: int = -2) -> Tensor:
    return chunks[0] if len(chunks) == 1 else torch.cat(list(chunks), dim)


def _block(query: Tensor, key: Tensor, value: Tensor, place: _Place, manner: Manner) -> Block:
    query, key, value = query[..., place.rows, :], key[..., place.columns, :], value[..., place.columns, :]
    repeats = query.shape[-3] // key.shape[-3]
    if repeats > 1:
        key, value = key.repeat_interleave(repeats, -3), value.repeat_interleave(repeats, -3)
    return Block(_strided(query), _strided(key), _strided(value), place.causal, manner.scale)


def _strided(x: Tensor) -> Tensor:
    """`x` as the fused kernels take it: with any strides but the last, which is one."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _fold_heads(grad: Tensor, heads: int) -> Tensor:
    """The gradient of each key's head: the sum over the queries' heads that share it."""
    if grad.shape[-3] == heads:
        return grad
    return grad.view(*grad.shape[:-3], heads, -1, *grad.shape[-2:]).sum(-3)


def _visits(key: Tensor, value: Tensor, sharing: Sharing) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Every rank's keys and values, this rank's own first, then those of the ranks before it."""
    group = sharing.group
    rank, size = group.rank(), group.size()
    if sharing.exchange == "gather" or size == 1:
        keys, values = all_parts(key, group), all_parts(value, group)
        for step in range(size):
            other = (rank - step) % size
            yield other, keys[other], values[other]
        return
    for step in range(size):
        moving = Rotation([key, value], group, tag=0) if step < size - 1 else None
        yield (rank - step) % size, key, value
        if moving is not None:
            key, value = moving.arrived()


class _Returning:
    """Gradients of keys and values on their way back to the ranks that hold them."""

    def __init__(self, sharing: Sharing) -> None:
        self._sharing = sharing
        self._parts: dict[int, tuple[Tensor, Tensor]] = {}
        self._moving: Rotation | None = None

    def add(self, other: int, dk: Tensor, dv: Tensor) -> None:
        """Hand over what this rank adds to the gradients of rank `other`'s keys and values."""
        if self._sharing.group.size() > 1:
            dk, dv = dk.float(), dv.float()  # ranks add to different numbers of chunks, and must send one dtype
        if self._sharing.exchange == "gather" or self._sharing.group.size() == 1:
            self._parts[other] = (dk, dv)
            return
        if self._moving is not None:
            so_far = self._moving.arrived()
            dk, dv = dk + so_far[0], dv + so_far[1]
        self._moving = Rotation([dk, dv], self._sharing.group, tag=1)

    def result(self) -> tuple[Tensor, Tensor]:
        """The gradients of this rank's own keys and values."""
        if self._moving is not None:
            dk, dv = self._moving.arrived()
            return dk, dv
        parts = [self._parts[rank] for rank in range(self._sharing.group.size())]
        group = self._sharing.group
        return summed_part([dk for dk, _ in parts], group), summed_part([dv for _, dv in parts], group)
