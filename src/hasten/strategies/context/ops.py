"""Exchanges between the ranks that share a sequence: whole sequences for parts of the heads, and keys around a ring."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hasten.strategies.context.layout import SequenceLayout

# Any in this file: the context and the gradients of torch.autograd.Function, which torch leaves untyped.


class _Swap(torch.autograd.Function):
    """Whole along one dimension and a part of another, exchanged for the opposite; so is the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, split: int, join: int, group: dist.ProcessGroup) -> Tensor:
        ctx.split, ctx.join, ctx.group = split, join, group
        return _swapped(x, split, join, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return _swapped(grad, ctx.join, ctx.split, ctx.group), None, None, None


class _Collect(torch.autograd.Function):
    """Every rank's part, joined; the gradient of a part is the sum of what every rank hands back for it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return torch.cat(all_parts(x, group), dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return summed_part(list(grad.chunk(ctx.group.size(), ctx.dim)), ctx.group), None, None


def swap(x: Tensor, split: int, join: int, group: dist.ProcessGroup) -> Tensor:
    """A part of dimension `split` and the whole of dimension `join`, of which each rank held a part. Ranks: the group."""
    if group.size() == 1:
        return x
    made: Tensor = _Swap.apply(x, split, join, group)  # type: ignore[no-untyped-call]  # torch leaves it untyped
    return made


def collect(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """Return the ranks' parts of `dim` joined, for ranks that go on to compute different things. Ranks: the group."""
    if group.size() == 1:
        return x
    made: Tensor = _Collect.apply(x, dim, group)  # type: ignore[no-untyped-call]  # torch leaves it untyped
    return made


def all_parts(x: Tensor, group: dist.ProcessGroup) -> list[Tensor]:
    """Return every rank's tensor, in order of rank; without gradients. Ranks: the group."""
    part = x.contiguous()
    if group.size() == 1:
        return [part]
    parts = [torch.empty_like(part) for _ in range(group.size())]
    dist.all_gather(parts, part, group=group)
    return parts


def summed_part(parts: list[Tensor], group: dist.ProcessGroup) -> Tensor:
    """Return the sum over the ranks of what each gives for this one; without gradients. Ranks: the group."""
    if len(parts) == 1:
        return parts[0]
    given = torch.stack(parts).contiguous()
    received = torch.empty_like(given)
    dist.all_to_all_single(received, given, group=group)
    wide = torch.float32 if given.dtype in (torch.bfloat16, torch.float16) else given.dtype
    return received.sum(0, dtype=wide).to(given.dtype)


def _swapped(x: Tensor, split: int, join: int, group: dist.ProcessGroup) -> Tensor:
    given = torch.stack(x.chunk(group.size(), split)).contiguous()
    received = torch.empty_like(given)
    dist.all_to_all_single(received, given, group=group)
    return torch.cat(received.unbind(0), join)


class Rotation:
    """Tensors on their way to the next rank of the ring while those of the one before it arrive."""

    def __init__(self, tensors: list[Tensor], group: dist.ProcessGroup, tag: int) -> None:
        self._shapes = [tensor.shape for tensor in tensors]
        self._sent = torch.cat([tensor.reshape(-1) for tensor in tensors])
        self._received = torch.empty_like(self._sent)
        rank, size = group.rank(), group.size()
        after = dist.get_global_rank(group, (rank + 1) % size)
        before = dist.get_global_rank(group, (rank - 1) % size)
        self._works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, self._sent, after, group, tag),
                dist.P2POp(dist.irecv, self._received, before, group, tag),
            ]
        )

    def arrived(self) -> list[Tensor]:
        """What the rank before this one has sent, in the shapes that were given."""
        for work in self._works:
            work.wait()
        flat = torch.split(self._received, [shape.numel() for shape in self._shapes])
        return [part.view(shape) for part, shape in zip(flat, self._shapes, strict=True)]


def held_part(whole: Tensor, dim: int, layout: SequenceLayout, rank: int) -> Tensor:
    """Return the part of a tensor that `rank` holds."""
    chunks = whole.chunk(layout.num_chunks, dim)
    return torch.cat([chunks[place] for place in layout.chunks(rank)], dim)
