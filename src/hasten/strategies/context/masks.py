"""Meaning of an attention mask whose sequence is sharded over ranks: causal, packed samples, a mask of keys, or refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Literal

import torch
from torch import Tensor

from hasten.errors import StepError
from hasten.runtime.streams import HostCopy
from hasten.strategies.context.sequence_plan import SequenceLayout

IGNORED: Final = -100
"""Label of tokens that the loss ignores, as in torch's cross entropy."""


class MaskReader:
    """Reader of the masks of one block; layers share a mask, so each mask is read once.

    A mask that a model makes from its shard of a sequence does not cover the other shards. Two kinds can be
    completed: a causal mask (recognised by its pattern), and a mask that hides the same keys from all queries.
    """

    def __init__(self, layout: SequenceLayout) -> None:
        self._layout = layout
        self._read: tuple[Tensor, Literal["causal"] | Tensor] | None = None

    def read(self, mask: Tensor, queries: int, keys: int) -> Literal["causal"] | Tensor:
        """Return "causal", or this rank's shard of a mask of keys with one row.

        Raises: StepError for any other mask.
        """
        if self._read is not None and self._read[0] is mask:
            return self._read[1]
        meaning = self._meaning(mask, queries, keys)
        self._read = (mask, meaning)
        return meaning

    def _meaning(
        self, mask: Tensor, queries: int, keys: int
    ) -> Literal["causal"] | Tensor:
        if mask.shape[-1] == keys and mask.shape[-2] in (1, queries):
            if (
                mask.shape[-2] == 1
                or mask.stride(-2) == 0
                or bool((mask == mask[..., :1, :]).all())
            ):
                return mask[..., :1, :]
            if queries == keys and (allowed_keys := _allowed_keys(mask)) is not None:
                causal_mask = torch.ones(
                    queries, queries, dtype=torch.bool, device=mask.device
                ).tril()
                if bool((allowed_keys == causal_mask).all()):
                    return "causal"
                if self._layout.chunks_per_rank == 2 and bool(
                    (allowed_keys == _causal_in_two_chunks(causal_mask)).all()
                ):
                    # made from positions that jump between the rank's two chunks
                    return "causal"
        raise StepError(
            f"attention was given a mask of shape {tuple(mask.shape)} for {queries} queries and {keys} keys of this "
            "rank, computed from a part of the sequence; what it masks on other ranks is unknown. Under context "
            "parallelism use is_causal=True (with padding on the right it needs no mask: set the labels of padding to -100 and do not "
            "pass attention_mask), or a mask of keys that is the same for all queries."
        )


def _allowed_keys(mask: Tensor) -> Tensor | None:
    """Return True where the mask allows attention, or None if the mask does more than hide keys."""
    if mask.dtype == torch.bool:
        return mask
    hidden = mask <= torch.finfo(mask.dtype).min / 2
    return mask == 0 if bool((hidden | (mask == 0)).all()) else None


def _causal_in_two_chunks(causal_mask: Tensor) -> Tensor:
    """Return a mask that is causal within each half, with no attention between the halves."""
    half = causal_mask.shape[0] // 2
    mask = causal_mask.clone()
    mask[half:, :half] = False
    return mask


@dataclass(frozen=True, slots=True)
class Contents:
    """Properties of the buffers of a block that decide how the block computes."""

    padded: bool
    """A mask of zeros and ones hides something.

    Models may then make different masks on different ranks, or no mask where nothing is hidden, so ranks have to agree.
    """
    ignoring: tuple[bool, ...]
    """For each buffer, whether it holds labels that the loss ignores."""
    counting: tuple[bool, ...] = ()
    """For each buffer, whether it holds the positions 0, 1, 2, … of the sequence, or of several samples packed into it."""
    restarting: tuple[bool, ...] = ()
    """For each buffer, whether it holds positions that restart, of several samples packed into one sequence."""


class PackedSamples:
    """Samples packed into the sequences of a block: each attends only to itself, over the shards of all ranks."""

    def __init__(self, positions: Tensor, layout: SequenceLayout, rank: int) -> None:
        """Take the positions of whole sequences, (length,) or (batch, length), which restart with each sample."""
        positions = positions.reshape(-1, positions.shape[-1])
        self._layout = layout
        self._rank = rank
        self._sample_numbers = (positions == 0).long().cumsum(-1)
        self._length = positions.shape[-1]
        self._shard_positions = positions[:, layout.positions(rank, self._length)]
        self._masks: dict[tuple[bool, bool], Tensor] = {}

    @property
    def splits_here(self) -> bool:
        """True if a sample starts inside one of this rank's chunks, so that a mask of this rank shows whether samples are kept apart."""
        starts = (self._shard_positions == 0).chunk(self._layout.chunks_per_rank, -1)
        return any(bool(chunk[:, 1:].any()) for chunk in starts)

    def causal(self, mask: Tensor | None, is_causal: bool) -> tuple[bool, bool] | None:
        """Return whether the attention of this rank's shard is causal, and whether it keeps samples apart; None if unknown.

        A model computes the mask from its shard, where samples seem to end at each jump of the positions, or to start at each 0.
        """
        if mask is None:
            return is_causal, False
        length = self._shard_positions.shape[-1]
        if (
            mask.shape[-2:] != (length, length)
            or (allowed := _allowed_keys(mask)) is None
        ):
            return None
        causal_mask = torch.ones(
            length, length, dtype=torch.bool, device=mask.device
        ).tril()
        jumps = torch.ones_like(self._shard_positions, dtype=torch.bool)
        jumps[:, 1:] = self._shard_positions[:, 1:] != self._shard_positions[:, :-1] + 1
        for starts in (jumps, self._shard_positions == 0):
            sample_numbers = starts.long().cumsum(-1)
            is_same_sample = (
                sample_numbers[:, None, :, None] == sample_numbers[:, None, None, :]
            ).to(mask.device)
            for causal, expected_mask in (
                (True, is_same_sample & causal_mask),
                (False, is_same_sample),
            ):
                if bool((allowed == expected_mask).all()):
                    return causal, True
        return (True, False) if bool((allowed == causal_mask).all()) else None

    def mask(self, causal: bool, by_rank: bool, device: torch.device) -> Tensor:
        """Return True where a query of this rank may attend to a key, (batch, 1, queries, keys).

        With `by_rank`, the queries are this rank's and the keys those of all ranks in the order of the ranks; without, both are the
        whole sequence in its order.
        """
        if (causal, by_rank) not in self._masks:
            ranks = range(self._layout.ranks)
            whole_positions = list(range(self._length))
            key_positions = (
                [
                    position
                    for rank in ranks
                    for position in self._layout.positions(rank, self._length)
                ]
                if by_rank
                else whole_positions
            )
            query_positions = (
                self._layout.positions(self._rank, self._length)
                if by_rank
                else whole_positions
            )
            allowed_keys = (
                self._sample_numbers[:, query_positions, None]
                == self._sample_numbers[:, None, key_positions]
            )
            if causal:
                allowed_keys = allowed_keys & (
                    torch.tensor(query_positions).unsqueeze(-1)
                    >= torch.tensor(key_positions)
                ).to(allowed_keys.device)
            self._masks[causal, by_rank] = allowed_keys[:, None].to(device)
        return self._masks[causal, by_rank]


def inspect_buffers(whole_buffers: list[tuple[Tensor, int]]) -> Callable[[], Contents]:
    """Start inspecting the buffers; the returned function waits for the result, the only time a block waits for the device.

    The device has work between the two: waiting here would leave it idle until the first layers are queued.
    """
    is_integer = [not t.is_floating_point() for t, _ in whole_buffers]
    if not any(is_integer):
        return lambda: Contents(
            False, tuple(is_integer), tuple(is_integer), tuple(is_integer)
        )
    pairs = zip(whole_buffers, is_integer, strict=True)
    seen_flags = torch.stack(
        [
            torch.stack(
                [
                    _restarts_positions(t, d),
                    _has_hidden_entries(t),
                    _has_ignored_labels(t),
                    _counts_positions(t, d),
                ]
            )
            for (t, d), is_integer_buffer in pairs
            if is_integer_buffer
        ]
    )
    host_flags = HostCopy(seen_flags)
    return lambda: _read_contents(is_integer, host_flags.wait())


def _read_contents(is_integer: list[bool], seen_flags: Tensor) -> Contents:
    """Return the contents read from the device."""
    rows = iter(seen_flags.tolist())
    buffer_flags = [
        next(rows) if is_integer_buffer else (False, False, False, False)
        for is_integer_buffer in is_integer
    ]
    return Contents(
        any(flags[1] for flags in buffer_flags),
        tuple(flags[2] for flags in buffer_flags),
        tuple(flags[3] or flags[0] for flags in buffer_flags),
        tuple(flags[0] for flags in buffer_flags),
    )


def _has_ignored_labels(buffer: Tensor) -> Tensor:
    """Return whether a tensor has labels that the loss ignores."""
    if buffer.dtype == torch.bool:
        return torch.zeros((), dtype=torch.bool, device=buffer.device)
    return (buffer == IGNORED).any()


def _has_hidden_entries(buffer: Tensor) -> Tensor:
    """Return whether a tensor is a mask of zeros and ones that has zeros."""
    return ((buffer == 0) | (buffer == 1)).all() & (buffer == 0).any()


def _counts_positions(buffer: Tensor, dim: int) -> Tensor:
    """Return whether a tensor holds the positions 0, 1, 2, … of the sequence."""
    values = buffer.movedim(dim, -1).long()
    return (values == torch.arange(values.shape[-1], device=values.device)).all()


def _restarts_positions(buffer: Tensor, dim: int) -> Tensor:
    """Return whether a tensor holds positions counted from zero that restart within the sequence."""
    values = buffer.movedim(dim, -1).long()
    first_position, later_positions, previous_positions = (
        values[..., 0],
        values[..., 1:],
        values[..., :-1],
    )
    is_counted = (first_position == 0).all() & (
        (later_positions == previous_positions + 1) | (later_positions == 0)
    ).all()
    return is_counted & (later_positions == 0).any() & (values.max() > 1)
