"""Attention over a sequence of which each rank holds a part: keys gathered, keys around a ring, or heads exchanged."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from hasten.strategies.context_blocks import Block, attend, attend_backward, merge
from hasten.strategies.context_layout import SequenceLayout
from hasten.strategies.context_ops import Rotation, all_parts, summed_part

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
        out = torch.zeros(*query.shape[:-1], value.shape[-1], dtype=torch.float32, device=query.device)
        lse = torch.full(query.shape[:-1], float("-inf"), dtype=torch.float32, device=query.device)
        for other, keys, values in _visits(key, value, sharing):
            for rows, columns, causal in _places(layout, rank, other, manner.causal, query, keys):
                block = _block(query[..., rows, :], keys[..., columns, :], values[..., columns, :], causal, manner)
                merged = merge(out[..., rows, :], lse[..., rows], *attend(block))
                out[..., rows, :], lse[..., rows] = merged
        whole = out.to(query.dtype)
        ctx.save_for_backward(query, key, value, whole, lse)
        return whole

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        query, key, value, out, lse = ctx.saved_tensors
        sharing, manner = ctx.sharing, ctx.manner
        rank, layout = sharing.group.rank(), sharing.layout
        dq = torch.zeros(query.shape, dtype=torch.float32, device=query.device)
        home = _Returning(sharing, key, value)
        for other, keys, values in _visits(key, value, sharing):
            dk = torch.zeros(keys.shape, dtype=torch.float32, device=keys.device)
            dv = torch.zeros(values.shape, dtype=torch.float32, device=values.device)
            for rows, columns, causal in _places(layout, rank, other, manner.causal, query, keys):
                block = _block(query[..., rows, :], keys[..., columns, :], values[..., columns, :], causal, manner)
                handed, made = grad[..., rows, :].contiguous(), out[..., rows, :].contiguous()
                more_q, more_k, more_v = attend_backward(block, handed, made, lse[..., rows].contiguous())
                dq[..., rows, :] += more_q
                dk[..., columns, :] += _fold_heads(more_k, key.shape[-3])
                dv[..., columns, :] += _fold_heads(more_v, key.shape[-3])
            home.add(other, dk, dv)
        dk, dv = home.result()
        return dq.to(query.dtype), dk.to(key.dtype), dv.to(value.dtype), None, None


def _places(
    layout: SequenceLayout, rank: int, other: int, causal: bool, query: Tensor, key: Tensor
) -> Iterator[tuple[slice, slice, bool]]:
    """The rows of queries and columns of keys of each block, and whether the causal mask acts inside it."""
    if not causal:
        yield slice(None), slice(None), False
        return
    row, column = query.shape[-2] // layout.chunks_per_rank, key.shape[-2] // layout.chunks_per_rank
    for pair in layout.pairs(rank, other, causal):
        rows = slice(pair.query * row, (pair.query + 1) * row)
        yield rows, slice(pair.key * column, (pair.key + 1) * column), pair.diagonal


def _block(query: Tensor, key: Tensor, value: Tensor, causal: bool, manner: Manner) -> Block:
    repeats = query.shape[-3] // key.shape[-3]
    if repeats > 1:
        key, value = key.repeat_interleave(repeats, -3), value.repeat_interleave(repeats, -3)
    return Block(query.contiguous(), key.contiguous(), value.contiguous(), causal, manner.scale)


def _fold_heads(grad: Tensor, heads: int) -> Tensor:
    """The gradient of each key's head: the sum over the queries' heads that share it."""
    if grad.shape[-3] == heads:
        return grad
    return grad.view(*grad.shape[:-3], heads, -1, *grad.shape[-2:]).sum(-3)


def _visits(key: Tensor, value: Tensor, sharing: Sharing) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Every rank's keys and values, this rank's own first, then those of the ranks before it."""
    group = sharing.group
    rank, size = group.rank(), group.size()
    if sharing.exchange == "gather":
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

    def __init__(self, sharing: Sharing, key: Tensor, value: Tensor) -> None:
        self._sharing = sharing
        self._parts: dict[int, tuple[Tensor, Tensor]] = {}
        self._moving: Rotation | None = None

    def add(self, other: int, dk: Tensor, dv: Tensor) -> None:
        """Hand over what this rank adds to the gradients of rank `other`'s keys and values."""
        if self._sharing.exchange == "gather":
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
