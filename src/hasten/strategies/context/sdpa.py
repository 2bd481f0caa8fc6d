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
from hasten.strategies.context.attention import Attention, SequenceGroup, causal_attention
from hasten.strategies.context.masks import MaskReader, PackedSamples
from hasten.strategies.context.ops import all_parts, collect, swap

_NAME: Final = "scaled_dot_product_attention"


class AttentionPatch:
    """Patch of scaled_dot_product_attention in all loaded modules; the modules found are cached between blocks."""

    def __init__(self) -> None:
        self._places: list[tuple[dict[str, Any], str]] = []  # Any: globals of modules
        self._seen = 0

    def original(self) -> Attention:
        """Return the function that is currently in torch.nn.functional."""
        found: Attention = getattr(F, _NAME)
        return found

    @contextmanager
    def replaced(self, stand_in: Attention) -> Iterator[None]:
        """Context manager in which `stand_in` is called instead, by every caller that looks the function up at call time."""
        original = self.original()
        fast_path = torch.backends.mha.get_fastpath_enabled()
        for names, name in self._find(original):
            names[name] = stand_in
        torch.backends.mha.set_fastpath_enabled(False)  # it computes attention without calling the function
        try:
            yield
        finally:
            torch.backends.mha.set_fastpath_enabled(fast_path)
            for names, name in self._find(stand_in):  # also in modules that were first imported inside the block
                names[name] = original

    def _find(self, function: Attention) -> list[tuple[dict[str, Any], str]]:  # Any: globals of modules
        """Return the globals that hold the function; modules are searched again only if others were loaded since."""
        if len(sys.modules) != self._seen:
            self._seen = len(sys.modules)
            self._places = []
            for module_name, module in list(sys.modules.items()):
                if module_name == "torch._C._nn":  # where torch looks its own function up, to recognise causal masks
                    continue
                for name, value in list(getattr(module, "__dict__", {}).items()):
                    if value is function:
                        self._places.append((vars(module), name))
        return self._places


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
            is_causal, hidden = self._agreed_packing(self.packed, attn_mask, is_causal, query), None
        else:
            hidden, is_causal = self._read(attn_mask, is_causal, query, key)
        if is_causal and queries != keys:
            raise StepError(
                f"causal attention of {queries} queries to {keys} keys is not supported inside a context-parallel block; "
                "a causal mask needs queries and keys of one sequence. Use it for self-attention only."
            )
        if not enable_gqa and query.shape[_HEADS] != key.shape[_HEADS]:
            key, value = (t.expand(*query.shape[: t.ndim - 2], *t.shape[-2:]) for t in (key, value))
        query, key, value = _autocast(query, key, value)
        manner = AttentionCall(is_causal, query.shape[-1] ** -0.5 if scale is None else scale)
        if (
            self.way == "ulysses" or self.sharing.group.size() == 1
        ):  # a single rank has all heads and the whole sequence
            return self._by_heads(query, key, value, hidden, dropout_p, manner)
        if hidden is not None or not is_causal or self.packed is not None:
            return self._with_all_keys(query, key, value, hidden, dropout_p, manner)
        shape = query.shape
        query, key, value = (t.reshape(-1, *t.shape[-3:]) if t.ndim != 3 else t[:, None] for t in (query, key, value))
        mixed = causal_attention(query, key, value, self.sharing, manner.scale, dropout_p, self.original)
        return mixed.reshape(*shape[:-1], value.shape[-1])

    def start(self) -> None:
        """Wait for the inspection of the buffers, unless that was done before."""
        if self.padded is None:
            self.padded, self.packed = self.begin()

    def _agreed_packing(self, packed: PackedSamples, mask: Tensor | None, is_causal: bool, query: Tensor) -> bool:
        """Return whether attention within samples is causal, by the masks that the ranks' models made from their shards.

        Raises: StepError on every rank if a mask is unknown, or if the model lets samples attend to each other.
        """
        if self.packed_causal is not None:
            return self.packed_causal
        found = packed.causal(mask, is_causal)
        causal, apart = found or (is_causal, True)
        mine = [found is None, packed.splits_here and not apart, causal]
        gathered = torch.tensor(mine, dtype=torch.int64, device=query.device)
        everyone = torch.stack(all_parts(gathered, self.sharing.group)).tolist()
        if any(row[0] or row[2] != everyone[0][2] for row in everyone):
            raise StepError(
                f"the positions of this context-parallel block restart, so samples are packed into its sequences, and attention was given "
                f"{'no mask' if mask is None else f'a mask of shape {tuple(mask.shape)}'} from which ranks cannot tell how samples attend "
                "to themselves. Use hasten.data.packed_attention_mask(position_ids), or a model of transformers with use_cache=False and "
                "without attention_mask; or set cp_size=1."
            )
        if any(row[1] for row in everyone):
            raise StepError(
                "the positions of this context-parallel block restart, so samples are packed into its sequences, but attention was called "
                "without a mask that keeps them apart: samples would attend to each other. Pass "
                "hasten.data.packed_attention_mask(position_ids) as attn_mask, or positions that do not restart."
            )
        self.packed_causal = causal
        return causal

    def _read(self, mask: Tensor | None, causal: bool, query: Tensor, key: Tensor) -> tuple[Tensor | None, bool]:
        """Return this rank's shard of a mask of keys, if any rank has one, and whether attention is causal."""
        problem: StepError | None = None
        meaning: Tensor | Literal["causal"] | None = None
        if mask is not None:
            try:
                meaning = self.masks.read(mask, query.shape[_LENGTH], key.shape[_LENGTH])
            except StepError as error:
                if not self.padded:
                    raise
                problem = error
        hidden = meaning if isinstance(meaning, Tensor) else self.hidden if causal and mask is None else None
        causal = causal or isinstance(meaning, str)
        if self.padded:
            hidden = self._agreed(hidden, causal, problem, query, key)
        return hidden, causal

    def _agreed(
        self, hidden: Tensor | None, causal: bool, problem: StepError | None, query: Tensor, key: Tensor
    ) -> Tensor | None:
        """Return the mask of keys in the same form on every rank; ranks without a mask get one that hides nothing.

        Raises: StepError on every rank if the masks of two ranks contradict each other.
        """
        sizes = [0] * 6 if hidden is None else [1, hidden.dtype == torch.bool, *[1] * (4 - hidden.ndim), *hidden.shape]
        gathered = torch.tensor([problem is not None, *sizes[:4], causal], dtype=torch.int64, device=query.device)
        everyone = torch.stack(all_parts(gathered, self.sharing.group)).tolist()
        if any(row[0] for row in everyone):
            raise problem or StepError(
                "another rank of this sequence received an attention mask that cannot be completed for this rank, so this rank stops "
                "too; see the error of that rank."
            )
        if any(row[5] != causal for row in everyone):
            raise StepError(
                "ranks of one sequence disagree whether attention is causal, because the model computes different masks from their "
                "parts. With padding on the right a causal model needs no mask: do not pass attention_mask, and set the labels of "
                "padding to -100."
            )
        rows = [row for row in everyone if row[1]]
        if not rows or hidden is not None:
            return hidden
        shape = (max(row[3] for row in rows), max(row[4] for row in rows), 1, key.shape[_LENGTH])
        if rows[0][2]:
            return torch.ones(shape, dtype=torch.bool, device=query.device)
        return torch.zeros(shape, dtype=query.dtype, device=query.device)

    def _check_lengths(self, queries: int, keys: int) -> None:
        wrong = next((length for length in (queries, keys) if length not in self.lengths), None)
        if wrong is not None:
            raise StepError(
                f"attention inside a context-parallel block was called with a length of {wrong}, but the buffers' parts "
                f"on this rank have {' or '.join(str(n) for n in sorted(self.lengths))} positions; whole sequences would be mixed with "
                "parts. Add every input of the model with a sequence dimension to the block's buffers, and compute attention over other "
                "sequences outside the block."
            )

    def _with_all_keys(
        self, query: Tensor, key: Tensor, value: Tensor, hidden: Tensor | None, dropout_p: float, manner: AttentionCall
    ) -> Tensor:
        """Compute attention in one call over all keys, ordered by the ranks that hold them."""
        group, layout = self.sharing.group, self.sharing.layout
        mask = None if hidden is None else torch.cat(all_parts(hidden, group), -1)
        if self.packed is not None:
            mask = self.packed.mask(manner.causal, True, query.device)
        elif manner.causal:
            length = key.shape[_LENGTH] * layout.ranks
            places = [layout.positions(rank, length) for rank in range(layout.ranks)]
            mine = torch.tensor(places[group.rank()], device=query.device).unsqueeze(-1)
            mask = _both(mask, mine >= torch.tensor([p for part in places for p in part], device=query.device))
        key, value = collect(key, key.ndim - 2, group), collect(value, value.ndim - 2, group)
        gqa = query.shape[_HEADS] != key.shape[_HEADS]
        return self.original(query, key, value, mask, dropout_p, False, scale=manner.scale, enable_gqa=gqa)

    def _by_heads(
        self, query: Tensor, key: Tensor, value: Tensor, hidden: Tensor | None, dropout_p: float, manner: AttentionCall
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
            key, value = key.repeat_interleave(repeats, _HEADS), value.repeat_interleave(repeats, _HEADS)
        across, along = query.ndim + _HEADS, query.ndim + _LENGTH
        query, key, value = (swap(t, across, along, group) for t in (query, key, value))
        mask = None if hidden is None else torch.cat(all_parts(hidden, group), -1)
        causal = manner.causal
        if self.packed is not None:
            mask, causal = self.packed.mask(causal, False, query.device), False
        elif mask is not None:
            mask = self._own_heads(mask)
            if causal:
                length = query.shape[_LENGTH]
                mask = _both(mask, torch.ones(length, length, dtype=torch.bool, device=query.device).tril())
                causal = False
        gqa = query.shape[_HEADS] != key.shape[_HEADS]
        out = self.original(query, key, value, mask, dropout_p, causal, scale=manner.scale, enable_gqa=gqa)
        return swap(out, along, across, group)

    def _own_heads(self, mask: Tensor) -> Tensor:
        """Return the rows for this rank's heads, of a mask that differs between heads."""
        if mask.ndim < 3 or mask.shape[_HEADS] == 1:
            return mask
        return mask.chunk(self.sharing.layout.ranks, _HEADS)[self.sharing.group.rank()]


def _both(mask: Tensor | None, visible: Tensor) -> Tensor:
    """Return a mask that also hides keys that are not visible."""
    if mask is None:
        return visible
    return mask & visible if mask.dtype == torch.bool else mask.masked_fill(~visible, float("-inf"))


def _autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Return the tensors in the dtype in which autocast computes attention, so that fewer bytes are sent."""
    kind = tensors[0].device.type
    if not torch.is_autocast_enabled(kind):
        return tensors
    dtype = torch.get_autocast_dtype(kind)
    return tuple(t.to(dtype) if t.dtype != torch.float64 else t for t in tensors)
