"""Replacement of scaled_dot_product_attention for sequences that are sharded over ranks."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from hasten.errors import ConfigError, StepError
from hasten.runtime.mesh_plan import divisors
from hasten.strategies.context.attention import (
    Attention,
    SequenceGroup,
    causal_attention,
    order_chunks,
)
from hasten.strategies.context.masks import MaskReader
from hasten.strategies.context.ops import gather_parts, swap_shards

_NAME: Final = "scaled_dot_product_attention"


class AttentionPatch:
    """Patch of scaled_dot_product_attention in all loaded modules; the modules found are cached between blocks."""

    def __init__(self) -> None:
        self._holders: list[tuple[dict[str, Any], str]] = []  # Any: globals of modules
        self._num_modules_seen = 0

    def original_attention(self) -> Attention:
        """Return the function that is currently in torch.nn.functional."""
        attention: Attention = getattr(F, _NAME)
        return attention

    @contextmanager
    def replace_attention(self, stand_in: Attention) -> Iterator[None]:
        """Context manager in which `stand_in` is called instead, by every caller that looks the function up at call time."""
        original = self.original_attention()
        fast_path = torch.backends.mha.get_fastpath_enabled()
        for names, name in self._find_holders(original):
            names[name] = stand_in
        # it computes attention without calling the function
        torch.backends.mha.set_fastpath_enabled(False)
        try:
            yield
        finally:
            torch.backends.mha.set_fastpath_enabled(fast_path)
            for names, name in self._find_holders(
                stand_in
            ):  # also in modules that were first imported inside the block
                names[name] = original

    # Any: globals of modules
    def _find_holders(self, function: Attention) -> list[tuple[dict[str, Any], str]]:
        """Return the globals that hold the function; modules are searched again only if others were loaded since."""
        if len(sys.modules) != self._num_modules_seen:
            self._num_modules_seen = len(sys.modules)
            self._holders = []
            for module_name, module in list(sys.modules.items()):
                # where torch looks its own function up, to recognise causal masks
                if module_name == "torch._C._nn":
                    continue
                for name, value in list(getattr(module, "__dict__", {}).items()):
                    if value is function:
                        self._holders.append((vars(module), name))
        return self._holders


ExchangeStrategy = Literal["allgather", "ulysses"]
_HEADS: Final = -3
_LENGTH: Final = -2


@dataclass(slots=True)
class SequenceAttention:
    """Attention over whole sequences, from this rank's shards of queries, keys and values.

    allgather: each rank gets all keys and values. ulysses: each rank gets whole sequences for a subset of the heads.
    """

    original: Attention
    sharing: SequenceGroup
    strategy_name: ExchangeStrategy
    lengths: frozenset[int]
    """Lengths of this rank's shards of the sequences."""
    masks: MaskReader
    begin: Callable[[], None]
    """Called once, before the first attention."""
    has_begun: bool = False
    key_mask: Tensor | None = None
    """Padding mask of whole sequences that was removed from a model's arguments, (batch, 1, 1, length)."""
    calls: int = 0

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
        self.start()
        self.calls += 1
        queries = query.shape[_LENGTH]
        keys = key.shape[_LENGTH]
        self._check_lengths(queries, keys)
        key_mask, is_causal = self._read_mask(attn_mask, is_causal, queries, keys)
        if is_causal and queries != keys:
            raise StepError(
                f"causal attention of {queries} queries to {keys} keys is not supported inside a context-parallel block; "
                "a causal mask needs queries and keys of one sequence. Use it for self-attention only."
            )
        if not enable_gqa and query.shape[_HEADS] != key.shape[_HEADS]:
            key, value = (
                t.expand(*query.shape[: t.ndim - 2], *t.shape[-2:])
                for t in (key, value)
            )
        query, key, value = _cast_for_autocast(query, key, value)
        scale = query.shape[-1] ** -0.5 if scale is None else scale
        # a single rank has all heads and the whole sequence
        if self.strategy_name == "ulysses" or self.sharing.group.size() == 1:
            return self._attend_by_heads(
                query, key, value, key_mask, dropout_p, is_causal, scale
            )
        if key_mask is not None or not is_causal:
            return self._attend_to_all_keys(
                query, key, value, key_mask, dropout_p, is_causal, scale
            )
        shape = query.shape
        query, key, value = (
            t.reshape(-1, *t.shape[-3:]) if t.ndim != 3 else t[:, None]
            for t in (query, key, value)
        )
        mixed = causal_attention(
            query, key, value, self.sharing, scale, dropout_p, self.original
        )
        return mixed.reshape(*shape[:-1], value.shape[-1])

    def start(self) -> None:
        """Wait for the inspection of the buffers, unless that was done before."""
        if not self.has_begun:
            self.has_begun = True
            self.begin()

    def _read_mask(
        self, mask: Tensor | None, causal: bool, queries: int, keys: int
    ) -> tuple[Tensor | None, bool]:
        """Return the mask of keys of whole sequences, if there is one, and whether attention is causal."""
        group = self.sharing.group
        layout = self.sharing.layout
        if mask is None:
            is_hidden = (
                self.key_mask is not None
                and self.key_mask.shape[-1] == keys * group.size()
            )
            return (self.key_mask if is_hidden else None), causal
        meaning = self.masks.read_mask(mask, queries, keys)
        if isinstance(meaning, str):
            return None, True
        return order_chunks(
            torch.cat(gather_parts(meaning, group), -1), layout, -1
        ), causal

    def _check_lengths(self, queries: int, keys: int) -> None:
        wrong_length = None
        for length in (queries, keys):
            if length not in self.lengths:
                wrong_length = length
                break
        if wrong_length is not None:
            raise StepError(
                f"attention inside a context-parallel block was called with a length of {wrong_length}, but the buffers' parts "
                f"on this rank have {' or '.join(map(str, sorted(self.lengths)))} positions; whole sequences would be mixed with "
                "parts. Add every input of the model with a sequence dimension to the block's buffers, and compute attention over other "
                "sequences outside the block."
            )

    def _attend_to_all_keys(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_mask: Tensor | None,
        dropout_p: float,
        causal: bool,
        scale: float,
    ) -> Tensor:
        """Compute attention in one call over all keys, in the order of the sequence."""
        key = self.sharing.gather_sequence(key, key.ndim + _LENGTH)
        value = self.sharing.gather_sequence(value, value.ndim + _LENGTH)
        mask = key_mask
        if causal:
            length = key.shape[_LENGTH]
            rank = self.sharing.group.rank()
            positions = torch.arange(length, device=query.device)
            query_positions = positions[self.sharing.layout.positions_of(rank, length)]
            mask = _combine_masks(mask, query_positions[:, None] >= positions)
        return self.original(
            query,
            key,
            value,
            mask,
            dropout_p,
            False,
            scale=scale,
            enable_gqa=query.shape[_HEADS] != key.shape[_HEADS],
        )

    def _attend_by_heads(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_mask: Tensor | None,
        dropout_p: float,
        causal: bool,
        scale: float,
    ) -> Tensor:
        """Compute attention over whole sequences for a subset of the heads, between two exchanges."""
        group = self.sharing.group
        ranks = self.sharing.layout.ranks
        heads = query.shape[_HEADS]
        if heads % ranks:
            raise ConfigError(
                f"cp_size={ranks} does not divide the {heads} heads of this attention, and cp_comm_strategy='ulysses' "
                f"splits the heads over the ranks. Set cp_size to one of {divisors(heads)}, or use "
                "cp_comm_strategy='allgather'."
            )
        if key.shape[_HEADS] % ranks:
            repeats = heads // key.shape[_HEADS]
            key = key.repeat_interleave(repeats, _HEADS)
            value = value.repeat_interleave(repeats, _HEADS)
        head_dim = query.ndim + _HEADS
        length_dim = query.ndim + _LENGTH
        query, key, value = (
            swap_shards(t, head_dim, length_dim, group) for t in (query, key, value)
        )
        mask = None if key_mask is None else self._own_heads(key_mask)
        if causal and mask is not None:
            length = query.shape[_LENGTH]
            visible_keys = torch.ones(
                length, length, dtype=torch.bool, device=query.device
            ).tril()
            mask = _combine_masks(mask, visible_keys)
            causal = False
        mixed = self.original(
            query,
            key,
            value,
            mask,
            dropout_p,
            causal,
            scale=scale,
            enable_gqa=query.shape[_HEADS] != key.shape[_HEADS],
        )
        return swap_shards(mixed, length_dim, head_dim, group)

    def _own_heads(self, mask: Tensor) -> Tensor:
        """Return the rows for this rank's heads, of a mask that differs between heads."""
        if mask.ndim < 3 or mask.shape[_HEADS] == 1:
            return mask
        return mask.chunk(self.sharing.layout.ranks, _HEADS)[self.sharing.group.rank()]


def _combine_masks(mask: Tensor | None, visible_keys: Tensor) -> Tensor:
    """Return a mask that also hides keys that are not visible."""
    if mask is None:
        return visible_keys
    if mask.dtype == torch.bool:
        return mask & visible_keys
    return mask.masked_fill(~visible_keys, float("-inf"))


def _cast_for_autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Return the tensors in the dtype in which autocast computes attention, so that fewer bytes are sent."""
    kind = tensors[0].device.type
    if not torch.is_autocast_enabled(kind):
        return tensors
    dtype = torch.get_autocast_dtype(kind)
    return tuple(t.to(dtype) if t.dtype != torch.float64 else t for t in tensors)
