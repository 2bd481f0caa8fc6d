"""Attention for megatron-core's layers in cases that need Transformer Engine otherwise: biases, and sharded sequences."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from hasten.extensions.megatron.package import package
from hasten.strategies.context.attention import (
    SequenceGroup,
    causal_attention,
    in_order,
)
from hasten.strategies.context.ops import all_parts
from hasten.strategies.context.sequence_plan import SequenceLayout


def layout_of(ranks: int) -> SequenceLayout:
    """Return the layout of sequences over context-parallel ranks that megatron-core's rotary positions expect."""
    return SequenceLayout(ranks, balanced=True, late_first=False)


class CoreAttention(nn.Module):
    """Attention module that replaces megatron-core's DotProductAttention in a layer spec."""

    def __init__(
        self,
        config: Any,  # Any: megatron-core is untyped
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: Any = None,
    ) -> None:
        super().__init__()
        self._scale = (
            config.kv_channels**-0.5 if softmax_scale is None else softmax_scale
        )
        self._dropout = (
            config.attention_dropout if attention_dropout is None else attention_dropout
        )
        # Tensor-parallel ranks hold different heads and use different random numbers.
        self._uses_forked_random = not config.sequence_parallel
        group = pg_collection.cp
        self._sequence_group = SequenceGroup(group, layout_of(group.size()))

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: Any = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: Any = None,
    ) -> Tensor:
        """Return the output (tokens, batch, heads x width) for queries of shape (tokens, batch, heads, width).

        `attention_mask` is True where a key must be hidden; without a mask, keys of later tokens are hidden.
        """
        dropout = self._dropout if self.training else 0.0
        is_divided = self._sequence_group.group.size() > 1
        if is_divided and attention_mask is None and not dropout:
            attended = causal_attention(
                _heads_first(query),
                _heads_first(key),
                _heads_first(value),
                self._sequence_group,
                self._scale,
            )
            return attended.permute(2, 0, 1, 3).flatten(2)
        if is_divided:
            key, value = (
                self._sequence_group.whole(key, 0),
                self._sequence_group.whole(value, 0),
            )
        added_mask = _score_mask(query, attention_mask, attention_bias)
        if not dropout or not self._uses_forked_random:
            attended = self._attend(query, key, value, added_mask, dropout)
        else:
            with package("tensor_parallel").get_cuda_rng_tracker().fork():
                attended = self._attend(query, key, value, added_mask, dropout)
        return attended.permute(2, 0, 1, 3).flatten(2)

    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        dropout: float,
    ) -> Tensor:
        repeats = query.shape[2] // key.shape[2]
        if repeats > 1:
            key, value = (
                key.repeat_interleave(repeats, 2),
                value.repeat_interleave(repeats, 2),
            )
        return functional.scaled_dot_product_attention(
            _heads_first(query),
            _heads_first(key),
            _heads_first(value),
            attn_mask=mask,
            dropout_p=dropout,
            is_causal=mask is None,
            scale=self._scale,
        )


def _heads_first(x: Tensor) -> Tensor:
    return x.permute(1, 2, 0, 3)


def _score_mask(
    query: Tensor, hidden_keys: Tensor | None, bias: Tensor | None
) -> Tensor | None:
    """Return the tensor to add to the scores; finite, so that a token whose keys are all hidden does not become NaN."""
    score_bias = None if bias is None else bias.to(query.dtype)
    if hidden_keys is None:
        return score_bias
    lowest_scores = torch.zeros(
        hidden_keys.shape, dtype=query.dtype, device=query.device
    )
    lowest_scores = lowest_scores.masked_fill(hidden_keys, torch.finfo(query.dtype).min)
    return lowest_scores if score_bias is None else score_bias + lowest_scores


class _GatherSequence(torch.autograd.Function):
    """All-gather along the sequence before a computation that is equal on every rank.

    Gradients are averaged over ranks later, so backward multiplies this rank's shard by the number of ranks.
    """

    # Any: the context and the gradients of torch.autograd.Function, which torch leaves untyped.

    @staticmethod
    def forward(ctx: Any, x: Tensor, layout: SequenceLayout) -> Tensor:
        group = package("parallel_state").get_context_parallel_group()
        ctx.layout, ctx.rank = layout, group.rank()
        return in_order(torch.cat(all_parts(x, group), 1), layout, 1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        local_positions = ctx.layout.positions(ctx.rank, grad.shape[1])
        return grad[:, local_positions] * ctx.layout.ranks, None


def gather_sequence(x: Tensor, layout: SequenceLayout) -> Tensor:
    """Return the values (batch, tokens, ...) of the whole sequence, in its order. Ranks: those that share the sequence."""
    if layout.ranks == 1:
        return x
    whole_sequence: Tensor = _GatherSequence.apply(x, layout)  # type: ignore[no-untyped-call]  # torch leaves it untyped
    return whole_sequence
