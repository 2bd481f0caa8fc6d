"""Attention over a sequence sharded over ranks, one block of queries and keys at a time, with the keys of all ranks gathered."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor

from hasten.strategies.context.ops import all_parts, held_part, summed_part
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

    def blocks(self, length: int) -> Iterator[AttentionBlockPlace]:
        """Yield the blocks of this rank's queries, of which it holds `length`, and the keys up to each of them."""
        size = length // self.layout.chunks_per_rank
        for row, chunk in enumerate(self.layout.chunks(self.group.rank())):
            rows = slice(row * size, (row + 1) * size)
            for column in range(chunk + 1):
                yield AttentionBlockPlace(rows, slice(column * size, (column + 1) * size), column == chunk, column == 0)

    def whole(self, part: Tensor) -> Tensor:
        """Return the keys or values of all ranks in the order of the sequence, without gradients. Ranks: the group."""
        chunks = torch.cat(all_parts(part, self.group), -2).chunk(self.layout.num_chunks, -2)
        return torch.cat([chunks[place] for place in self.layout.order()], -2)

    def own_sum(self, whole: Tensor) -> Tensor:
        """Return this rank's part of the sum of the ranks' gradients for the whole sequence. Ranks: the group."""
        parts = [held_part(whole, -2, self.layout, rank) for rank in range(self.group.size())]
        return summed_part(parts, self.group)


@dataclass(frozen=True, slots=True)
class AttentionBlockPlace:
    """A chunk of queries, and a chunk of keys that it attends to."""

    rows: slice
    columns: slice
    causal: bool
    """Both are the same chunk, within which a causal mask applies."""
    is_first: bool
    """The first chunk of keys for these queries."""


def causal_attention(query: Tensor, key: Tensor, value: Tensor, sharing: SequenceGroup, scale: float) -> Tensor:
    """Compute causal attention of this rank's queries over the keys of all ranks, one block of scores at a time. Ranks: the group.

    Tensors are (batch, heads, length, width); keys and values may have fewer heads, each shared by several query heads.
    """
    output: Tensor = _CausalAttention.apply(query, key, value, sharing, scale)  # type: ignore[no-untyped-call]  # as torch is
    return output


class _CausalAttention(torch.autograd.Function):
    # Any: the context and the gradients of torch.autograd.Function, which torch leaves untyped.

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, sharing: SequenceGroup, scale: float) -> Tensor:
        ctx.sharing, ctx.scale = sharing, scale
        keys, values = sharing.whole(key), sharing.whole(value)
        outputs: list[Tensor] = []
        sums: list[Tensor] = []
        for place in sharing.blocks(query.shape[-2]):
            output, lse = attend(_block(query, keys, values, place, scale))
            if place.is_first:
                outputs.append(output)
                sums.append(lse)
            else:
                outputs[-1], sums[-1] = merge(outputs[-1], sums[-1], output, lse)
        joined, lse = torch.cat(outputs, -2).to(query.dtype), torch.cat(sums, -1)
        ctx.save_for_backward(query, key, value, joined, lse)
        return joined

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        query, key, value, output, lse = ctx.saved_tensors
        sharing: SequenceGroup = ctx.sharing
        keys, values = sharing.whole(key), sharing.whole(value)
        dq = torch.zeros_like(query, dtype=torch.float32)
        dk, dv = torch.zeros_like(keys, dtype=torch.float32), torch.zeros_like(values, dtype=torch.float32)
        for place in sharing.blocks(query.shape[-2]):
            rows, columns = place.rows, place.columns
            block = _block(query, keys, values, place, ctx.scale)
            block_grad, block_output = _strided(grad[..., rows, :]), _strided(output[..., rows, :])
            more_q, more_k, more_v = attend_backward(block, block_grad, block_output, lse[..., rows].contiguous())
            dq[..., rows, :] += more_q
            dk[..., columns, :] += _fold_heads(more_k, key.shape[-3])
            dv[..., columns, :] += _fold_heads(more_v, key.shape[-3])
        own_k, own_v = sharing.own_sum(dk), sharing.own_sum(dv)
        return dq.to(query.dtype), own_k.to(key.dtype), own_v.to(value.dtype), None, None


def _block(query: Tensor, key: Tensor, value: Tensor, place: AttentionBlockPlace, scale: float) -> AttentionBlock:
    query, key, value = query[..., place.rows, :], key[..., place.columns, :], value[..., place.columns, :]
    repeats = query.shape[-3] // key.shape[-3]
    if repeats > 1:
        key, value = key.repeat_interleave(repeats, -3), value.repeat_interleave(repeats, -3)
    return AttentionBlock(_strided(query), _strided(key), _strided(value), place.causal, scale)


def _strided(x: Tensor) -> Tensor:
    """Return `x` with a stride of one in its last dimension, as the fused kernels need it."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _fold_heads(grad: Tensor, heads: int) -> Tensor:
    """Sum the gradients of the query heads that share a key head."""
    if grad.shape[-3] == heads:
        return grad
    return grad.view(*grad.shape[:-3], heads, -1, *grad.shape[-2:]).sum(-3)
