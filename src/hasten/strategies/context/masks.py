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

    def __init__(self, sequence_layout: SequenceLayout) -> None:
        self._layout = sequence_layout
        self._read: tuple[Tensor, Literal["causal"] | Tensor] | None = None

    def read_mask(
        self, mask: Tensor, queries: int, keys: int
    ) -> Literal["causal"] | Tensor:
        """Return "causal", or this rank's shard of a mask of keys with one row.

        Raises: StepError for any other mask.
        """
        if self._read is not None and self._read[0] is mask:
            return self._read[1]
        meaning = self._read_meaning(mask, queries, keys)
        self._read = (mask, meaning)
        return meaning

    def _read_meaning(
        self, mask: Tensor, num_queries: int, num_keys: int
    ) -> Literal["causal"] | Tensor:
        if mask.shape[-1] == num_keys and mask.shape[-2] in (1, num_queries):
            if (
                mask.shape[-2] == 1
                or mask.stride(-2) == 0
                or bool((mask == mask[..., :1, :]).all())
            ):
                return mask[..., :1, :]
            if (
                num_queries == num_keys
                and (allowed_keys := _allowed_keys(mask)) is not None
            ):
                causal_mask = torch.ones(
                    num_queries, num_queries, dtype=torch.bool, device=mask.device
                ).tril()
                if bool((allowed_keys == causal_mask).all()):
                    return "causal"
                if self._layout.chunks_per_rank == 2 and bool(
                    (allowed_keys == _causal_in_two_chunks(causal_mask)).all()
                ):
                    # made from positions that jump between the rank's two chunks
                    return "causal"
        raise StepError(
            f"attention was given a mask of shape {tuple(mask.shape)} for {num_queries} queries and {num_keys} keys of this "
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
class BufferFlags:
    """Properties of one buffer of a block that decide how the block computes."""

    has_ignored_labels: bool = False
    counts_positions: bool = False
    """The buffer holds the positions 0, 1, 2, … of the sequence."""
    restarts_positions: bool = False
    """The buffer holds positions that restart, of several samples packed into one sequence."""


def inspect_buffers(
    whole_buffers: list[tuple[Tensor, int]],
) -> Callable[[], list[BufferFlags]]:
    """Start inspecting the buffers; the returned function waits for the result, the only time a block waits for the device.

    The device has work between the two: waiting here would leave it idle until the first layers are queued.
    """
    integer_indices = []
    for index, (buffer, _) in enumerate(whole_buffers):
        if not buffer.is_floating_point():
            integer_indices.append(index)
    device_flags = [_inspect_buffer(*whole_buffers[index]) for index in integer_indices]
    if device_flags:
        host_flags = HostCopy(torch.stack(device_flags))
    else:
        host_flags = None

    def read_flags() -> list[BufferFlags]:
        buffer_flags = [BufferFlags() for _ in whole_buffers]
        rows = [] if host_flags is None else host_flags.wait().tolist()
        for index, row in zip(integer_indices, rows, strict=True):
            buffer_flags[index] = BufferFlags(*row)
        return buffer_flags

    return read_flags


def _inspect_buffer(buffer: Tensor, dim: int) -> Tensor:
    """Return the flags of a buffer, in the order of the fields of `BufferFlags`."""
    has_ignored_labels = torch.zeros((), dtype=torch.bool, device=buffer.device)
    if buffer.dtype != torch.bool:
        has_ignored_labels = (buffer == IGNORED).any()
    return torch.stack(
        [
            has_ignored_labels,
            _counts_positions(buffer, dim),
            _restarts_positions(buffer, dim),
        ]
    )


def _counts_positions(buffer: Tensor, dim: int) -> Tensor:
    """Return whether a tensor holds the positions 0, 1, 2, … of the sequence."""
    values = buffer.movedim(dim, -1).long()
    return (values == torch.arange(values.shape[-1], device=values.device)).all()


def _restarts_positions(buffer: Tensor, dim: int) -> Tensor:
    """Return whether a tensor holds positions counted from zero that restart within the sequence."""
    values = buffer.movedim(dim, -1).long()
    first_position = values[..., 0]
    later_positions = values[..., 1:]
    previous_positions = values[..., :-1]
    is_counted = (first_position == 0).all() & (
        (later_positions == previous_positions + 1) | (later_positions == 0)
    ).all()
    return is_counted & (later_positions == 0).any() & (values.max() > 1)
