"""Exchanges between the ranks that share a sequence: all-to-all of sequences and heads, and gathers."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hasten.strategies.context.sequence_plan import SequenceLayout

# Any in this file: the context and the gradients of torch.autograd.Function, which torch leaves untyped.


class _Swap(torch.autograd.Function):
    """All-to-all from shards of one dimension to shards of another; the gradient takes the reverse direction."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, split: int, join: int, group: dist.ProcessGroup
    ) -> Tensor:
        ctx.split, ctx.join, ctx.group = split, join, group
        return _swapped(x, split, join, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return _swapped(grad, ctx.join, ctx.split, ctx.group), None, None, None


class _Collect(torch.autograd.Function):
    """All-gather of the ranks' shards; the gradient of a shard is the sum of the ranks' gradients for it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return torch.cat(all_parts(x, group), dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return (
            summed_part(list(grad.chunk(ctx.group.size(), ctx.dim)), ctx.group),
            None,
            None,
        )


def swap(x: Tensor, split: int, join: int, group: dist.ProcessGroup) -> Tensor:
    """Return `x` sharded along `split` and whole along `join`, which was sharded before. Ranks: the group."""
    if group.size() == 1:
        return x
    swapped: Tensor = _Swap.apply(x, split, join, group)  # type: ignore[no-untyped-call]  # torch leaves it untyped
    return swapped


def collect(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """Return the ranks' shards concatenated along `dim`; ranks may compute different things with them. Ranks: the group."""
    if group.size() == 1:
        return x
    gathered: Tensor = _Collect.apply(x, dim, group)  # type: ignore[no-untyped-call]  # torch leaves it untyped
    return gathered


def all_parts(x: Tensor, group: dist.ProcessGroup) -> list[Tensor]:
    """Return the tensors of all ranks, in order of rank, without gradients. Ranks: the group."""
    local_shard = x.contiguous()
    if group.size() == 1:
        return [local_shard]
    parts_by_rank = [torch.empty_like(local_shard) for _ in range(group.size())]
    dist.all_gather(parts_by_rank, local_shard, group=group)
    return parts_by_rank


def summed_part(parts_by_rank: list[Tensor], group: dist.ProcessGroup) -> Tensor:
    """Return the sum over ranks of the tensors that each has for this rank, without gradients. Ranks: the group."""
    if len(parts_by_rank) == 1:
        return parts_by_rank[0]
    stacked_parts = torch.stack(parts_by_rank).contiguous()
    received = torch.empty_like(stacked_parts)
    dist.all_to_all_single(received, stacked_parts, group=group)
    sum_dtype = (
        torch.float32
        if stacked_parts.dtype in (torch.bfloat16, torch.float16)
        else stacked_parts.dtype
    )
    return received.sum(0, dtype=sum_dtype).to(stacked_parts.dtype)


def _swapped(x: Tensor, split: int, join: int, group: dist.ProcessGroup) -> Tensor:
    stacked_chunks = torch.stack(x.chunk(group.size(), split)).contiguous()
    received = torch.empty_like(stacked_chunks)
    dist.all_to_all_single(received, stacked_chunks, group=group)
    return torch.cat(received.unbind(0), join)


def shard_of_rank(
    whole_tensor: Tensor, dim: int, layout: SequenceLayout, rank: int
) -> Tensor:
    """Return the shard of a tensor that `rank` holds."""
    chunks = whole_tensor.chunk(layout.num_chunks, dim)
    return torch.cat([chunks[chunk_index] for chunk_index in layout.chunks(rank)], dim)
