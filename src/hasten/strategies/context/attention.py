"""Attention over a sequence sharded over ranks, one block of queries and keys at a time, with the keys of all ranks gathered."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor

from hasten.strategies.context.ops import all_parts, summed_part
from hasten.strategies.context.sequence_plan import SequenceLayout

_TILE: Final = 512
"""Number of queries whose scores are in memory at a time if no fused kernel can be used."""
_HALF: Final = (torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True)
class AttentionBlock:
    """Queries (batch, heads, length, width), keys and values with as many heads, and the mask and scale of attention."""

    query: Tensor
    key: Tensor
    value: Tensor
    causal: bool
    """Attend only to keys up to the query's index."""
    scale: float


def attend(block: AttentionBlock) -> tuple[Tensor, Tensor]:
    """Return the output and the log-sum-exp (batch, heads, length) in float32, without gradients."""
    forward, _ = _kernel(block)
    out, lse = forward(block)
    return out, lse.float()


def attend_backward(block: AttentionBlock, grad: Tensor, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return this block's contributions to the gradients of its queries, keys and values.

    `out` and `lse` belong to attention over all keys, not over this block's keys alone.
    """
    _, backward = _kernel(block)
    return backward(block, grad, out, lse)


def merge(out: Tensor, lse: Tensor, more: Tensor, more_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Merge the attention outputs over two disjoint sets of keys, in float32."""
    total = torch.logaddexp(lse, more_lse)
    kept, added = (lse - total).exp().unsqueeze(-1), (more_lse - total).exp().unsqueeze(-1)
    return out * kept + more * added, total


_Forward = Callable[[AttentionBlock], tuple[Tensor, Tensor]]
_Backward = Callable[[AttentionBlock, Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]


def _kernel(block: AttentionBlock) -> tuple[_Forward, _Backward]:
    q, width = block.query, block.query.shape[-1]
    if block.value.shape[-1] == width:
        if q.device.type == "cpu":
            return _flash_cpu, _flash_cpu_backward
        if q.device.type == "cuda" and q.dtype in _HALF and width % 8 == 0 and width <= 256:
            return _flash_cuda, _flash_cuda_backward
    return _plain, _plain_backward


def _flash_cpu(block: AttentionBlock) -> tuple[Tensor, Tensor]:
    op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    out, lse = op(block.query, block.key, block.value, 0.0, block.causal, scale=block.scale)
    return out, lse


def _flash_cpu_backward(block: AttentionBlock, grad: Tensor, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    given = (grad, block.query, block.key, block.value, out.to(block.query.dtype), lse)
    dq, dk, dv = op(*given, 0.0, block.causal, scale=block.scale)
    return dq, dk, dv


def _flash_cuda(block: AttentionBlock) -> tuple[Tensor, Tensor]:
    op = torch.ops.aten._scaled_dot_product_flash_attention
    made: Any = op(block.query, block.key, block.value, 0.0, block.causal, False, scale=block.scale)  # Any: nine values
    return made[0], made[1][..., : block.query.shape[-2]]


def _flash_cuda_backward(
    block: AttentionBlock, grad: Tensor, out: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    op = torch.ops.aten._scaled_dot_product_flash_attention_backward
    q, k, v = block.query, block.key, block.value
    unused = torch.empty(0, dtype=torch.int64, device=q.device)  # for packed sequences and dropout, which are not used
    dq, dk, dv = op(
        *(grad, q, k, v, out.to(q.dtype), lse.contiguous(), None, None, q.shape[-2], k.shape[-2]),
        *(0.0, block.causal, unused, unused),
        scale=block.scale,
    )
    return dq, dk, dv


def _tiles(block: AttentionBlock) -> Iterator[tuple[slice, Tensor]]:
    """Yield the scores of one tile of queries at a time, in float32, minus infinity where masked."""
    key = block.key.float().transpose(-2, -1)
    columns = torch.arange(block.key.shape[-2], device=key.device)
    for start in range(0, block.query.shape[-2], _TILE):
        rows = slice(start, min(start + _TILE, block.query.shape[-2]))
        scores = (block.query[..., rows, :].float() @ key) * block.scale
        if block.causal:
            mine = torch.arange(rows.start, rows.stop, device=key.device)
            scores = scores.masked_fill(columns > mine.unsqueeze(-1), float("-inf"))
        yield rows, scores


def _plain(block: AttentionBlock) -> tuple[Tensor, Tensor]:
    with torch.autocast(block.query.device.type, enabled=False):
        value, outs, sums = block.value.float(), [], []
        for _, scores in _tiles(block):
            lse = scores.logsumexp(-1)
            outs.append((scores - lse.unsqueeze(-1)).exp() @ value)
            sums.append(lse)
        return torch.cat(outs, -2), torch.cat(sums, -1)


def _plain_backward(block: AttentionBlock, grad: Tensor, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    with torch.autocast(block.query.device.type, enabled=False):
        key, value, grad = block.key.float(), block.value.float(), grad.float()
        inner = (grad * out.float()).sum(-1, keepdim=True)
        dk, dv = torch.zeros_like(key), torch.zeros_like(value)
        dqs: list[Tensor] = []
        for rows, scores in _tiles(block):
            shares = (scores - lse[..., rows].unsqueeze(-1)).exp()
            handed = grad[..., rows, :]
            dv += shares.transpose(-2, -1) @ handed
            dscores = shares * (handed @ value.transpose(-2, -1) - inner[..., rows, :]) * block.scale
            dqs.append(dscores @ key)
            dk += dscores.transpose(-2, -1) @ block.query[..., rows, :].float()
        return torch.cat(dqs, -2), dk, dv


@dataclass(frozen=True, slots=True)
class SequenceGroup:
    """Process group that shares a sequence, with the sequence's layout."""

    group: dist.ProcessGroup
    layout: SequenceLayout


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """Mask and scale of an attention call."""

    causal: bool
    scale: float


def blockwise(query: Tensor, key: Tensor, value: Tensor, sharing: SequenceGroup, manner: AttentionCall) -> Tensor:
    """Compute attention of this rank's queries over the keys of all ranks, one block of scores at a time. Ranks: the group.

    Tensors are (batch, heads, length, width); keys and values may have fewer heads, each shared by several query heads.
    """
    made: Tensor = _Blockwise.apply(query, key, value, sharing, manner)  # type: ignore[no-untyped-call]  # as torch is
    return made


class _Blockwise(torch.autograd.Function):
    # Any: the context and the gradients of torch.autograd.Function, which torch leaves untyped.

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, sharing: SequenceGroup, manner: AttentionCall
    ) -> Tensor:
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
        contributions: dict[int, tuple[Tensor, Tensor]] = {}
        for other, keys, values in _visits(key, value, sharing):
            dk, dv = _Chunks(keys, chunks), _Chunks(values, chunks)
            for place in _places(layout, rank, other, manner.causal, query, keys):
                block = _block(query, keys, values, place, manner)
                handed, made = _strided(grad[..., place.rows, :]), _strided(out[..., place.rows, :])
                more_q, more_k, more_v = attend_backward(block, handed, made, lse[..., place.rows].contiguous())
                dq.add(place.row, more_q)
                dk.add(place.column, _fold_heads(more_k, key.shape[-3]))
                dv.add(place.column, _fold_heads(more_v, key.shape[-3]))
            # ranks add up different numbers of chunks, but must send one dtype
            contributions[other] = dk.joined().float(), dv.joined().float()
        by_rank = [contributions[other] for other in range(sharing.group.size())]
        own_k = summed_part([more_k for more_k, _ in by_rank], sharing.group)
        own_v = summed_part([more_v for _, more_v in by_rank], sharing.group)
        return dq.joined().to(query.dtype), own_k.to(key.dtype), own_v.to(value.dtype), None, None


@dataclass(frozen=True, slots=True)
class _BlockPlace:
    """A chunk of queries and a chunk of keys to attend to, as indices and as slices."""

    row: int
    rows: slice
    column: int
    columns: slice
    causal: bool
    """Apply the causal mask inside the block."""


def _places(
    layout: SequenceLayout, rank: int, other: int, causal: bool, query: Tensor, key: Tensor
) -> Iterator[_BlockPlace]:
    """Yield the blocks of this rank's queries with the keys of rank `other`."""
    if not causal:
        yield _BlockPlace(0, slice(None), 0, slice(None), False)
        return
    row, column = query.shape[-2] // layout.chunks_per_rank, key.shape[-2] // layout.chunks_per_rank
    for pair in layout.pairs(rank, other, causal):
        rows = slice(pair.query * row, (pair.query + 1) * row)
        yield _BlockPlace(pair.query, rows, pair.key, slice(pair.key * column, (pair.key + 1) * column), pair.diagonal)


class _Chunks:
    """The chunks of a gradient, each the sum of the blocks' contributions; sums of several are held in float32."""

    def __init__(self, like: Tensor, number: int) -> None:
        self._like = like
        self._made: list[Tensor | None] = [None] * number

    def add(self, number: int, more: Tensor) -> None:
        so_far = self._made[number]
        self._made[number] = more if so_far is None else so_far.float().add_(more)

    def joined(self) -> Tensor:
        """Return the whole gradient, with zeros where no block contributed."""
        shape = (*self._like.shape[:-2], self._like.shape[-2] // len(self._made), self._like.shape[-1])
        return _joined([self._like.new_zeros(shape) if made is None else made for made in self._made])


def _joined(chunks: Sequence[Tensor], dim: int = -2) -> Tensor:
    return chunks[0] if len(chunks) == 1 else torch.cat(list(chunks), dim)


def _block(query: Tensor, key: Tensor, value: Tensor, place: _BlockPlace, manner: AttentionCall) -> AttentionBlock:
    query, key, value = query[..., place.rows, :], key[..., place.columns, :], value[..., place.columns, :]
    repeats = query.shape[-3] // key.shape[-3]
    if repeats > 1:
        key, value = key.repeat_interleave(repeats, -3), value.repeat_interleave(repeats, -3)
    return AttentionBlock(_strided(query), _strided(key), _strided(value), place.causal, manner.scale)


def _strided(x: Tensor) -> Tensor:
    """Return `x` with a stride of one in its last dimension, as the fused kernels need it."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _fold_heads(grad: Tensor, heads: int) -> Tensor:
    """Sum the gradients of the query heads that share a key head."""
    if grad.shape[-3] == heads:
        return grad
    return grad.view(*grad.shape[:-3], heads, -1, *grad.shape[-2:]).sum(-3)


def _visits(key: Tensor, value: Tensor, sharing: SequenceGroup) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Yield the keys and values of every rank, this rank's first, then those of the ranks before it."""
    group = sharing.group
    keys, values = all_parts(key, group), all_parts(value, group)
    for step in range(group.size()):
        other = (group.rank() - step) % group.size()
        yield other, keys[other], values[other]
