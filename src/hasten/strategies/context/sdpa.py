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
)
from hasten.strategies.context.masks import MaskReader, PackedSamples
from hasten.strategies.context.ops import all_parts, collect, swap

_NAME: Final = "scaled_dot_product_attention"


class AttentionPatch:
    """Patch of scaled_dot_product_attention in all loaded modules; the modules found are cached between blocks."""

    def __init__(self) -> None:
        self._holders: list[tuple[dict[str, Any], str]] = []  # Any: globals of modules
        self._num_modules_seen = 0

    def original(self) -> Attention:
        """Return the function that is currently in torch.nn.functional."""
        attention: Attention = getattr(F, _NAME)
        return attention

    @contextmanager
    def replaced(self, stand_in: Attention) -> Iterator[None]:
        """Context manager in which `stand_in` is called instead, by every caller that looks the function up at call time."""
        original = self.original()
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


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """Mask and scale of an attention call."""

    causal: bool
    scale: float


Way = Literal["allgather", "ulysses"]
_HEADS: Final = -3
_LENGTH: Final = -2


@dataclass(slots=True)
class SequenceAttention:
    """Attention over whole sequences, from this rank's shards of queries, keys and values.

    allgather: each rank gets all keys and values. ulysses: each rank gets whole sequences for a subset of the heads.
    """

    original: Attention
    sharing: SequenceGroup
    way: Way
    lengths: frozenset[int]
    """Lengths of this rank's shards of the sequences."""
    masks: MaskReader
    begin: Callable[[], tuple[bool, PackedSamples | None]]
    """Called once, before the first attention; returns whether masks may differ between ranks because of padding, and the
    samples that are packed into the sequences."""
    padded: bool | None = None
    packed: PackedSamples | None = None
    packed_causal: bool | None = None
    """Whether attention within packed samples is causal; None until the ranks have agreed."""
    hidden: Tensor | None = None
    """This rank's shard of the padding mask that was removed from a causal model's arguments (batch, 1, 1, length)."""
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
        queries, keys = query.shape[_LENGTH], key.shape[_LENGTH]
        self._check_lengths(queries, keys)
        if self.packed is not None:
            is_causal, key_mask = (
                self._agree_on_packing(self.packed, attn_mask, is_causal, query),
                None,
            )
        else:
            key_mask, is_causal = self._read_mask(attn_mask, is_causal, query, key)
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
        attention_call = AttentionCall(
            is_causal, query.shape[-1] ** -0.5 if scale is None else scale
        )
        if (
            self.way == "ulysses" or self.sharing.group.size() == 1
        ):  # a single rank has all heads and the whole sequence
            return self._attend_by_heads(
                query, key, value, key_mask, dropout_p, attention_call
            )
        if key_mask is not None or not is_causal or self.packed is not None:
            return self._attend_to_all_keys(
                query, key, value, key_mask, dropout_p, attention_call
            )
        shape = query.shape
        query, key, value = (
            t.reshape(-1, *t.shape[-3:]) if t.ndim != 3 else t[:, None]
            for t in (query, key, value)
        )
        mixed = causal_attention(
            query,
            key,
            value,
            self.sharing,
            attention_call.scale,
            dropout_p,
            self.original,
        )
        return mixed.reshape(*shape[:-1], value.shape[-1])

    def start(self) -> None:
        """Wait for the inspection of the buffers, unless that was done before."""
        if self.padded is None:
            self.padded, self.packed = self.begin()

    def _agree_on_packing(
        self, packed: PackedSamples, mask: Tensor | None, is_causal: bool, query: Tensor
    ) -> bool:
        """Return whether attention within samples is causal, by the masks that the ranks' models made from their shards.

        Raises: StepError on every rank if a mask is unknown, or if the model lets samples attend to each other.
        """
        if self.packed_causal is not None:
            return self.packed_causal
        meaning = packed.causal(mask, is_causal)
        causal, keeps_apart = meaning or (is_causal, True)
        own_flags = [meaning is None, packed.splits_here and not keeps_apart, causal]
        gathered = torch.tensor(own_flags, dtype=torch.int64, device=query.device)
        flags_by_rank = torch.stack(all_parts(gathered, self.sharing.group)).tolist()
        if any(flags[0] or flags[2] != flags_by_rank[0][2] for flags in flags_by_rank):
            raise StepError(
                f"the positions of this context-parallel block restart, so samples are packed into its sequences, and attention was given "
                f"{'no mask' if mask is None else f'a mask of shape {tuple(mask.shape)}'} from which ranks cannot tell how samples attend "
                "to themselves. Use hasten.data.packed_attention_mask(position_ids), or a model of transformers with use_cache=False and "
                "without attention_mask; or set cp_size=1."
            )
        if any(flags[1] for flags in flags_by_rank):
            raise StepError(
                "the positions of this context-parallel block restart, so samples are packed into its sequences, but attention was called "
                "without a mask that keeps them apart: samples would attend to each other. Pass "
                "hasten.data.packed_attention_mask(position_ids) as attn_mask, or positions that do not restart."
            )
        self.packed_causal = causal
        return causal

    def _read_mask(
        self, mask: Tensor | None, causal: bool, query: Tensor, key: Tensor
    ) -> tuple[Tensor | None, bool]:
        """Return this rank's shard of a mask of keys, if any rank has one, and whether attention is causal."""
        problem: StepError | None = None
        meaning: Tensor | Literal["causal"] | None = None
        if mask is not None:
            try:
                meaning = self.masks.read(
                    mask, query.shape[_LENGTH], key.shape[_LENGTH]
                )
            except StepError as error:
                if not self.padded:
                    raise
                problem = error
        key_mask = (
            meaning
            if isinstance(meaning, Tensor)
            else self.hidden
            if causal and mask is None
            else None
        )
        causal = causal or isinstance(meaning, str)
        if self.padded:
            key_mask = self._agree_on_mask(key_mask, causal, problem, query, key)
        return key_mask, causal

    def _agree_on_mask(
        self,
        key_mask: Tensor | None,
        causal: bool,
        problem: StepError | None,
        query: Tensor,
        key: Tensor,
    ) -> Tensor | None:
        """Return the mask of keys in the same form on every rank; ranks without a mask get one that hides nothing.

        Raises: StepError on every rank if the masks of two ranks contradict each other.
        """
        mask_sizes = (
            [0] * 6
            if key_mask is None
            else [
                1,
                key_mask.dtype == torch.bool,
                *[1] * (4 - key_mask.ndim),
                *key_mask.shape,
            ]
        )
        gathered = torch.tensor(
            [problem is not None, *mask_sizes[:4], causal],
            dtype=torch.int64,
            device=query.device,
        )
        rows_by_rank = torch.stack(all_parts(gathered, self.sharing.group)).tolist()
        if any(row[0] for row in rows_by_rank):
            raise problem or StepError(
                "another rank of this sequence received an attention mask that cannot be completed for this rank, so this rank stops "
                "too; see the error of that rank."
            )
        if any(row[5] != causal for row in rows_by_rank):
            raise StepError(
                "ranks of one sequence disagree whether attention is causal, because the model computes different masks from their "
                "parts. With padding on the right a causal model needs no mask: do not pass attention_mask, and set the labels of "
                "padding to -100."
            )
        rows = [row for row in rows_by_rank if row[1]]
        if not rows or key_mask is not None:
            return key_mask
        shape = (
            max(row[3] for row in rows),
            max(row[4] for row in rows),
            1,
            key.shape[_LENGTH],
        )
        if rows[0][2]:
            return torch.ones(shape, dtype=torch.bool, device=query.device)
        return torch.zeros(shape, dtype=query.dtype, device=query.device)

    def _check_lengths(self, queries: int, keys: int) -> None:
        wrong_length = next(
            (length for length in (queries, keys) if length not in self.lengths), None
        )
        if wrong_length is not None:
            raise StepError(
                f"attention inside a context-parallel block was called with a length of {wrong_length}, but the buffers' parts "
                f"on this rank have {' or '.join(str(n) for n in sorted(self.lengths))} positions; whole sequences would be mixed with "
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
        attention_call: AttentionCall,
    ) -> Tensor:
        """Compute attention in one call over all keys, ordered by the ranks that hold them."""
        group, layout = self.sharing.group, self.sharing.layout
        mask = None if key_mask is None else torch.cat(all_parts(key_mask, group), -1)
        if self.packed is not None:
            mask = self.packed.mask(attention_call.causal, True, query.device)
        elif attention_call.causal:
            length = key.shape[_LENGTH] * layout.ranks
            positions_by_rank = [
                layout.positions(rank, length) for rank in range(layout.ranks)
            ]
            query_positions = torch.tensor(
                positions_by_rank[group.rank()], device=query.device
            ).unsqueeze(-1)
            mask = _combine_masks(
                mask,
                query_positions
                >= torch.tensor(
                    [
                        position
                        for rank_positions in positions_by_rank
                        for position in rank_positions
                    ],
                    device=query.device,
                ),
            )
        key, value = (
            collect(key, key.ndim - 2, group),
            collect(value, value.ndim - 2, group),
        )
        gqa = query.shape[_HEADS] != key.shape[_HEADS]
        return self.original(
            query,
            key,
            value,
            mask,
            dropout_p,
            False,
            scale=attention_call.scale,
            enable_gqa=gqa,
        )

    def _attend_by_heads(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_mask: Tensor | None,
        dropout_p: float,
        attention_call: AttentionCall,
    ) -> Tensor:
        """Compute attention over whole sequences for a subset of the heads, between two exchanges."""
        group, ranks = self.sharing.group, self.sharing.layout.ranks
        heads = query.shape[_HEADS]
        if heads % ranks:
            raise ConfigError(
                f"cp_size={ranks} does not divide the {heads} heads of this attention, and cp_comm_strategy='ulysses' "
                f"splits the heads over the ranks. Set cp_size to one of {divisors(heads)}, or use "
                "cp_comm_strategy='allgather'."
            )
        if key.shape[_HEADS] % ranks:
            repeats = heads // key.shape[_HEADS]
            key, value = (
                key.repeat_interleave(repeats, _HEADS),
                value.repeat_interleave(repeats, _HEADS),
            )
        head_dim, length_dim = query.ndim + _HEADS, query.ndim + _LENGTH
        query, key, value = (
            swap(t, head_dim, length_dim, group) for t in (query, key, value)
        )
        mask = None if key_mask is None else torch.cat(all_parts(key_mask, group), -1)
        causal = attention_call.causal
        if self.packed is not None:
            mask, causal = self.packed.mask(causal, False, query.device), False
        elif mask is not None:
            mask = self._own_heads(mask)
            if causal:
                length = query.shape[_LENGTH]
                mask = _combine_masks(
                    mask,
                    torch.ones(
                        length, length, dtype=torch.bool, device=query.device
                    ).tril(),
                )
                causal = False
        gqa = query.shape[_HEADS] != key.shape[_HEADS]
        mixed = self.original(
            query,
            key,
            value,
            mask,
            dropout_p,
            causal,
            scale=attention_call.scale,
            enable_gqa=gqa,
        )
        return swap(mixed, length_dim, head_dim, group)

    def _own_heads(self, mask: Tensor) -> Tensor:
        """Return the rows for this rank's heads, of a mask that differs between heads."""
        if mask.ndim < 3 or mask.shape[_HEADS] == 1:
            return mask
        return mask.chunk(self.sharing.layout.ranks, _HEADS)[self.sharing.group.rank()]


def _combine_masks(mask: Tensor | None, visible_keys: Tensor) -> Tensor:
    """Return a mask that also hides keys that are not visible."""
    if mask is None:
        return visible_keys
    return (
        mask & visible_keys
        if mask.dtype == torch.bool
        else mask.masked_fill(~visible_keys, float("-inf"))
    )


def _cast_for_autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Return the tensors in the dtype in which autocast computes attention, so that fewer bytes are sent."""
    kind = tensors[0].device.type
    if not torch.is_autocast_enabled(kind):
        return tensors
    dtype = torch.get_autocast_dtype(kind)
    return tuple(t.to(dtype) if t.dtype != torch.float64 else t for t in tensors)
