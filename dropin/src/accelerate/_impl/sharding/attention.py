"""Attention of transformers' models over sequences that are sharded over processes (Ulysses)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.nn import functional

from accelerate._impl.surface.messages import message
from hasten.comm.process_group import ProcessGroupComm
from hasten.errors import PrepareError, StepError
from hasten.optional import need
from hasten.strategies.context.attention import SequenceGroup
from hasten.strategies.context.calls import SPANNING_ATTENTION
from hasten.strategies.context.masks import MaskReader
from hasten.strategies.context.sdpa import SequenceAttention
from hasten.strategies.context.sequence_plan import SequenceLayout

# Any in this file: transformers is untyped here.


class SpannedAttention:
    """Attention function for transformers that spans the shards of all processes, in training and while shards are read."""

    def __init__(self, comm: ProcessGroupComm, lengths: set[int], reading_parts: Callable[[], bool]) -> None:
        layout = SequenceLayout(comm.size, balanced=False)
        self._attention = SequenceAttention(
            functional.scaled_dot_product_attention,
            SequenceGroup(comm.group, layout, "gather"),
            "ulysses",
            frozenset(),
            MaskReader(layout),
            begin=lambda: (False, None),
        )
        self._ranks, self._lengths, self._reading_parts = comm.size, lengths, reading_parts

    def attach(self, model: nn.Module, wanted: str | None) -> None:
        """Make the model attend to whole sequences. Raises: PrepareError unless it uses transformers' attention functions."""
        inner: Any = model
        if not getattr(inner, "_supports_attention_backend", False):
            raise PrepareError(message("attention_not_replaceable", type(model).__name__, self._ranks))
        if (kind := wanted or inner.config._attn_implementation) not in ("sdpa", SPANNING_ATTENTION):
            raise PrepareError(message("attention_by_another_kernel", kind, self._ranks))
        transformers = need("transformers", ">=5", "ParallelismConfig(sp_size=...)")
        transformers.AttentionInterface.register(SPANNING_ATTENTION, self)
        transformers.AttentionMaskInterface.register(SPANNING_ATTENTION, need("transformers.masking_utils").sdpa_mask)
        inner.set_attn_implementation(SPANNING_ATTENTION)

    def __call__(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        dropout: float = 0.0,
        scaling: float | None = None,
        is_causal: bool | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        if not module.training and not self._reading_parts():  # evaluation reads whole sequences
            whole = need("transformers.integrations.sdpa_attention").sdpa_attention_forward
            given = {"dropout": dropout, "scaling": scaling, "is_causal": is_causal, **kwargs}
            out: tuple[Tensor, None] = whole(module, query, key, value, attention_mask, **given)
            return out
        self._check(query.shape[-2], kwargs.get("sliding_window"))
        causal = is_causal if is_causal is not None else bool(getattr(module, "is_causal", True))
        gqa = query.shape[1] != key.shape[1]
        mixed = self._attention(
            query, key, value, attention_mask, dropout, causal and attention_mask is None, scaling, enable_gqa=gqa
        )
        return mixed.transpose(1, 2).contiguous(), None

    def _check(self, length: int, window: int | None) -> None:
        if length not in self._lengths:
            raise StepError(message("sequences_not_split", length, self._ranks))
        if window is not None and window < length * self._ranks:
            raise StepError(message("window_too_short", window, length * self._ranks, self._ranks))
        self._attention.lengths = frozenset(self._lengths)
