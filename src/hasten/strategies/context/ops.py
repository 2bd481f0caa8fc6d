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
        ctx: Any,
        tensor: Tensor,
        split_dim: int,
        join_dim: int,
        process_group: dist.ProcessGroup,
    ) -> Tensor:
        ctx.split = split_dim
        ctx.join = join_dim
        ctx.group = process_group
        return _all_to_all(tensor, split_dim, join_dim, process_group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return _all_to_all(grad, ctx.join, ctx.split, ctx.group), None, None, None


class _Collect(torch.autograd.Function):
    """All-gather of the ranks' shards; the gradient of a shard is the sum of the ranks' gradients for it."""

    @staticmethod
    def forward(
        ctx: Any, tensor: Tensor, dim: int, process_group: dist.ProcessGroup
    ) -> Tensor:
        ctx.dim = dim
        ctx.group = process_group
        return torch.cat(gather_parts(tensor, process_group), dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return (
            reduce_parts(list(grad.chunk(ctx.group.size(), ctx.dim)), ctx.group),
            None,
            None,
        )


def swap_shards(
    tensor: Tensor, split_dim: int, join_dim: int, process_group: dist.ProcessGroup
) -> Tensor:
    """Return `x` sharded along `split` and whole along `join`, which was sharded before. Ranks: the group."""
    if process_group.size() == 1:
        return tensor
    swapped: Tensor = _Swap.apply(tensor, split_dim, join_dim, process_group)  # type: ignore[no-untyped-call]  # torch leaves it untyped
    return swapped


def gather_shards(tensor: Tensor, dim: int, process_group: dist.ProcessGroup) -> Tensor:
    """Return the ranks' shards concatenated along `dim`; ranks may compute different things with them. Ranks: the group."""
    if process_group.size() == 1:
        return tensor
    gathered: Tensor = _Collect.apply(tensor, dim, process_group)  # type: ignore[no-untyped-call]  # torch leaves it untyped
    return gathered


def gather_parts(tensor: Tensor, process_group: dist.ProcessGroup) -> list[Tensor]:
    """Return the tensors of all ranks, in order of rank, without gradients. Ranks: the group."""
    local_shard = tensor.contiguous()
    if process_group.size() == 1:
        return [local_shard]
    parts_by_rank = [torch.empty_like(local_shard) for _ in range(process_group.size())]
    dist.all_gather(parts_by_rank, local_shard, group=process_group)
    return parts_by_rank


def reduce_parts(
    parts_by_rank: list[Tensor], process_group: dist.ProcessGroup
) -> Tensor:
    """Return the sum over ranks of the tensors that each has for this rank, without gradients. Ranks: the group."""
    if len(parts_by_rank) == 1:
        return parts_by_rank[0]
    stacked_parts = torch.stack(parts_by_rank).contiguous()
    received = torch.empty_like(stacked_parts)
    dist.all_to_all_single(received, stacked_parts, group=process_group)
    if stacked_parts.dtype in (torch.bfloat16, torch.float16):
        sum_dtype = torch.float32
    else:
        sum_dtype = stacked_parts.dtype
    return received.sum(0, dtype=sum_dtype).to(stacked_parts.dtype)


def _all_to_all(
    tensor: Tensor, split_dim: int, join_dim: int, process_group: dist.ProcessGroup
) -> Tensor:
    stacked_chunks = torch.stack(
        tensor.chunk(process_group.size(), split_dim)
    ).contiguous()
    received = torch.empty_like(stacked_chunks)
    dist.all_to_all_single(received, stacked_chunks, group=process_group)
    return torch.cat(received.unbind(0), join_dim)


def shard_of_rank(
    whole_tensor: Tensor, dim: int, sequence_layout: SequenceLayout, rank: int
) -> Tensor:
    """Return the shard of a tensor that `rank` holds."""
    chunks = whole_tensor.chunk(sequence_layout.num_chunks, dim)
    return torch.cat(
        [chunks[chunk_index] for chunk_index in sequence_layout.chunks_of(rank)], dim
    )
