"""Attention of some queries to some of the keys, with what is needed to merge it with attention to the others.

Softmax over all keys is recovered from parts by their log-sum-exp. The fused kernels of torch give it and take it in
their backward; where no fused kernel fits, the same arithmetic is done in float32, a tile of queries at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

_TILE: Final = 512
"""Queries whose scores are held at one time where no fused kernel fits."""
_HALF: Final = (torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True)
class Block:
    """Queries (batch, heads, length, width), keys and values with as many heads, and how they attend."""

    query: Tensor
    key: Tensor
    value: Tensor
    causal: bool
    """Only to keys up to the query's own index."""
    scale: float


def attend(block: Block) -> tuple[Tensor, Tensor]:
    """The output, and the log-sum-exp (batch, heads, length) in float32; without gradients."""
    forward, _ = _kernel(block)
    out, lse = forward(block)
    return out, lse.float()


def attend_backward(block: Block, grad: Tensor, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """What the block adds to the gradients of its queries, keys and values.

    `out` and `lse` are those of the queries over all keys, not this block's alone.
    """
    _, backward = _kernel(block)
    return backward(block, grad, out, lse)


def merge(out: Tensor, lse: Tensor, more: Tensor, more_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Attention to two disjoint sets of keys, from that to each, in float32."""
    total = torch.logaddexp(lse, more_lse)
    kept, added = (lse - total).exp().unsqueeze(-1), (more_lse - total).exp().unsqueeze(-1)
    return out * kept + more * added, total


_Forward = Callable[[Block], tuple[Tensor, Tensor]]
_Backward = Callable[[Block, Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]


def _kernel(block: Block) -> tuple[_Forward, _Backward]:
    q, width = block.query, block.query.shape[-1]
    if block.value.shape[-1] == width:
        if q.device.type == "cpu":
            return _flash_cpu, _flash_cpu_backward
        if q.device.type == "cuda" and q.dtype in _HALF and width % 8 == 0 and width <= 256:
            return _flash_cuda, _flash_cuda_backward
    return _plain, _plain_backward


def _flash_cpu(block: Block) -> tuple[Tensor, Tensor]:
    op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    out, lse = op(block.query, block.key, block.value, 0.0, block.causal, scale=block.scale)
    return out, lse


def _flash_cpu_backward(block: Block, grad: Tensor, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    given = (grad, block.query, block.key, block.value, out.to(block.query.dtype), lse)
    dq, dk, dv = op(*given, 0.0, block.causal, scale=block.scale)
    return dq, dk, dv


def _flash_cuda(block: Block) -> tuple[Tensor, Tensor]:
    op = torch.ops.aten._scaled_dot_product_flash_attention
    made: Any = op(block.query, block.key, block.value, 0.0, block.causal, False, scale=block.scale)  # Any: nine values
    return made[0], made[1][..., : block.query.shape[-2]]


def _flash_cuda_backward(block: Block, grad: Tensor, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    op = torch.ops.aten._scaled_dot_product_flash_attention_backward
    q, k, v = block.query, block.key, block.value
    unused = torch.empty(0, dtype=torch.int64, device=q.device)  # of sequences packed into one, and of dropout
    dq, dk, dv = op(
        *(grad, q, k, v, out.to(q.dtype), lse.contiguous(), None, None, q.shape[-2], k.shape[-2]),
        *(0.0, block.causal, unused, unused),
        scale=block.scale,
    )
    return dq, dk, dv


def _tiles(block: Block) -> Iterator[tuple[slice, Tensor]]:
    """Scores in float32, minus infinity where masked, for one tile of queries after another."""
    key = block.key.float().transpose(-2, -1)
    columns = torch.arange(block.key.shape[-2], device=key.device)
    for start in range(0, block.query.shape[-2], _TILE):
        rows = slice(start, min(start + _TILE, block.query.shape[-2]))
        scores = (block.query[..., rows, :].float() @ key) * block.scale
        if block.causal:
            mine = torch.arange(rows.start, rows.stop, device=key.device)
            scores = scores.masked_fill(columns > mine.unsqueeze(-1), float("-inf"))
        yield rows, scores


def _plain(block: Block) -> tuple[Tensor, Tensor]:
    with torch.autocast(block.query.device.type, enabled=False):
        value, outs, sums = block.value.float(), [], []
        for _, scores in _tiles(block):
            lse = scores.logsumexp(-1)
            outs.append((scores - lse.unsqueeze(-1)).exp() @ value)
            sums.append(lse)
        return torch.cat(outs, -2), torch.cat(sums, -1)


def _plain_backward(block: Block, grad: Tensor, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
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
