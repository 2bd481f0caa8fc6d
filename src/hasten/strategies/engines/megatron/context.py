"""Whole sequences from the parts that context parallel ranks of a Megatron engine compute."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hasten.strategies.context.layout import SequenceLayout
from hasten.strategies.context.ops import all_parts
from hasten.strategies.engines.megatron.attention import in_order
from hasten.strategies.engines.megatron.package import package


class _Gathered(torch.autograd.Function):
    """Every rank computes the same from the whole; gradients are averaged over ranks, so that each part's counts for all."""

    # Any: the context and the gradients of torch.autograd.Function, which torch leaves untyped.

    @staticmethod
    def forward(ctx: Any, x: Tensor, layout: SequenceLayout) -> Tensor:
        group = package("parallel_state").get_context_parallel_group()
        ctx.layout, ctx.rank = layout, group.rank()
        return in_order(torch.cat(all_parts(x, group), 1), layout, 1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        own = ctx.layout.positions(ctx.rank, grad.shape[1])
        return grad[:, own] * ctx.layout.ranks, None


def gathered(x: Tensor, layout: SequenceLayout) -> Tensor:
    """The values (batch, tokens, ...) of the whole sequence, in its order. Ranks: those that share a sequence."""
    if layout.ranks == 1:
        return x
    made: Tensor = _Gathered.apply(x, layout)  # type: ignore[no-untyped-call]  # torch leaves it untyped
    return made
