"""The function that stands in for scaled_dot_product_attention where each rank holds a part of the sequence."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, Literal

import torch
from torch import Tensor

from hasten.errors import ConfigError, StepError
from hasten.runtime.axes import divisors
from hasten.strategies.context_attention import Manner, Sharing, blockwise
from hasten.strategies.context_masks import MaskReader
from hasten.strategies.context_ops import all_parts, collect, swap
from hasten.strategies.context_patch import Attention

Way = Literal["allgather", "ring", "ulysses"]
_HEADS: Final = -3
_LENGTH: Final = -2


@dataclass(slots=True)
class SequenceAttention:
    """Attention over whole sequences, from this rank's parts of queries, keys and values.

    allgather: every rank gets all keys and values. ring: they pass from rank to rank. ulysses: every rank gets whole
    sequences of a part of the heads.
    """

    original: Attention
    sharing: Sharing
    way: Way
    lengths: frozenset[int]
    """The lengths of this rank's parts of the sequences that were sharded."""
    masks: MaskReader
    calls: int = field(default=0)

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        self.calls += 1
        queries, keys = query.shape[_LENGTH], key.shape[_LENGTH]
        self._check_lengths(queries, keys)
        hidden = None
        if attn_mask is not None:
            meaning = self.masks.read(attn_mask, queries, keys)
            hidden = meaning if isinstance(meaning, Tensor) else None
            is_causal = is_causal or not isinstance(meaning, Tensor)
        if is_causal and queries != keys:
            raise StepError(
                f"causal attention of {queries} queries to {keys} keys was asked for inside a context-parallel block; "
                "a causal mask needs queries and keys of one sequence. Use it for self-attention only."
            )
        if not enable_gqa and query.shape[_HEADS] != key.shape[_HEADS]:
            key, value = (t.expand(*query.shape[: t.ndim - 2], *t.shape[-2:]) for t in (key, value))
        query, key, value = _autocast(query, key, value)
        manner = Manner(is_causal, query.shape[-1] ** -0.5 if scale is None else scale)
        match self.way:
            case "ulysses":
                return self._by_heads(query, key, value, hidden, dropout_p, manner)
            case "ring" if hidden is not None or dropout_p > 0:
                raise ConfigError(
                    f"cp_comm_strategy='ring' passes keys and values from rank to rank, without "
                    f"{'a mask of keys' if hidden is not None else f'dropout (dropout_p={dropout_p})'} inside attention. "
                    "Use cp_comm_strategy='allgather' or 'ulysses'."
                )
            case "allgather" if hidden is not None or dropout_p > 0 or not is_causal:
                return self._with_all_keys(query, key, value, hidden, dropout_p, manner)
        shape = query.shape
        query, key, value = (t.reshape(-1, *t.shape[-3:]) if t.ndim != 3 else t[:, None] for t in (query, key, value))
        return blockwise(query, key, value, self.sharing, manner).reshape(*shape[:-1], value.shape[-1])

    def _check_lengths(self, queries: int, keys: int) -> None:
        wrong = next((length for length in (queries, keys) if length not in self.lengths), None)
        if wrong is not None:
            raise StepError(
                f"attention inside a context-parallel block was called with a length of {wrong}, but the buffers' parts "
                f"on this rank have {' or '.join(str(n) for n in sorted(self.lengths))} positions; it would mix whole "
                "sequences with parts. Name every tensor with a sequence dimension that enters the model in the "
                "block's buffers, and keep attention over other sequences outside it."
            )

    def _with_all_keys(
        self, query: Tensor, key: Tensor, value: Tensor, hidden: Tensor | None, dropout_p: float, manner: Manner
    ) -> Tensor:
        """One call over all keys, in the order of the ranks that hold them."""
        group, layout = self.sharing.group, self.sharing.layout
        mask = None if hidden is None else torch.cat(all_parts(hidden, group), -1)
        if manner.causal:
            length = key.shape[_LENGTH] * layout.ranks
            places = [layout.positions(rank, length) for rank in range(layout.ranks)]
            mine = torch.tensor(places[group.rank()], device=query.device).unsqueeze(-1)
            mask = _both(mask, mine >= torch.tensor([p for part in places for p in part], device=query.device))
        key, value = collect(key, key.ndim - 2, group), collect(value, value.ndim - 2, group)
        gqa = query.shape[_HEADS] != key.shape[_HEADS]
        return self.original(query, key, value, mask, dropout_p, False, scale=manner.scale, enable_gqa=gqa)

    def _by_heads(
        self, query: Tensor, key: Tensor, value: Tensor, hidden: Tensor | None, dropout_p: float, manner: Manner
    ) -> Tensor:
        """Whole sequences of a part of the heads: attention as in one process, between two exchanges."""
        group, ranks = self.sharing.group, self.sharing.layout.ranks
        heads = query.shape[_HEADS]
        if heads % ranks:
            raise ConfigError(
                f"cp_size={ranks} does not divide the {heads} heads of this attention, and cp_comm_strategy='ulysses' "
                f"gives every rank a part of them. Set cp_size to one of {divisors(heads)}, or use "
                "cp_comm_strategy='ring' or 'allgather'."
            )
        if key.shape[_HEADS] % ranks:
            repeats = heads // key.shape[_HEADS]
            key, value = key.repeat_interleave(repeats, _HEADS), value.repeat_interleave(repeats, _HEADS)
        across, along = query.ndim + _HEADS, query.ndim + _LENGTH
        query, key, value = (swap(t, across, along, group) for t in (query, key, value))
        mask = None if hidden is None else torch.cat(all_parts(hidden, group), -1)
        causal = manner.causal
        if mask is not None:
            mask = self._own_heads(mask)
            if causal:
                length = query.shape[_LENGTH]
                mask = _both(mask, torch.ones(length, length, dtype=torch.bool, device=query.device).tril())
                causal = False
        gqa = query.shape[_HEADS] != key.shape[_HEADS]
        out = self.original(query, key, value, mask, dropout_p, causal, scale=manner.scale, enable_gqa=gqa)
        return swap(out, along, across, group)

    def _own_heads(self, mask: Tensor) -> Tensor:
        """The rows of a mask that differs between heads which belong to this rank's heads."""
        if mask.ndim < 3 or mask.shape[_HEADS] == 1:
            return mask
        return mask.chunk(self.sharing.layout.ranks, _HEADS)[self.sharing.group.rank()]


def _both(mask: Tensor | None, visible: Tensor) -> Tensor:
    """A mask that also hides what is not visible."""
    if mask is None:
        return visible
    return mask & visible if mask.dtype == torch.bool else mask.masked_fill(~visible, float("-inf"))


def _autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Tensors in the dtype in which autocast would compute attention, so that fewer bytes travel."""
    kind = tensors[0].device.type
    if not torch.is_autocast_enabled(kind):
        return tensors
    dtype = torch.get_autocast_dtype(kind)
    return tuple(t.to(dtype) if t.dtype != torch.float64 else t for t in tensors)
