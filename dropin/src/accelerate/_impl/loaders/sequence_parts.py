"""Loaders of sequence shards: each process of a group gets its shard of every member's batch in turn."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any, Final

import torch
from torch import Tensor

from hasten.comm.base import Comm
from hasten.data.position import Position
from hasten.data.source import BatchSource, Item, OuterSource
from hasten.errors import DataError, StepError
from hasten.strategies.context.masks import IGNORED, inspect_buffers

# Any in this file: the user's batches.
_TOKENS: Final = (
    "input_ids",
    "inputs_embeds",
    "position_ids",
    "labels",
    "shift_labels",
)


@dataclass(slots=True)
class SequenceSplitter:
    """Splitter of batches into sequence shards, one for each process of a group."""

    comm: Comm
    length: int | None = None
    """Promised length of every sequence; None if lengths vary."""
    lengths: set[int] = field(default_factory=set)
    """Lengths of the shards that were returned so far."""

    def parts(self, batch: Any) -> list[dict[str, Any]]:
        """Return each process's shard of a batch, in order: contiguous along dimension 1, with labels shifted by one.

        Raises: DataError for a batch that cannot be split, StepError for packed sequences.
        """
        if not isinstance(batch, Mapping):
            raise DataError(
                f"sp_size needs batches that are dicts of tensors, but the loader returned a {type(batch).__name__}. Return a dict with input_ids and labels from collate_fn."
            )
        tensors_by_key = dict(batch)
        token_name = next(
            (
                token_name
                for token_name in _TOKENS
                if isinstance(tensors_by_key.get(token_name), Tensor)
            ),
            None,
        )
        if token_name is None:
            raise DataError(
                f"a batch with {', '.join(map(str, tensors_by_key))} has no input_ids, so its sequences are unknown. Return input_ids from collate_fn."
            )
        length = self._checked_length(tensors_by_key[token_name], token_name)
        if tensors_by_key.get("position_ids") is None:
            tensors_by_key["position_ids"] = torch.arange(length).expand(
                tensors_by_key[token_name].shape[0], -1
            )
        if inspect_buffers([(tensors_by_key["position_ids"], 1)])()[
            0
        ].restarts_positions:
            raise StepError(
                "position_ids restart, so several sequences are packed into one and would attend to each other (sp_size > 1). Unpack them."
            )
        _check_padding(tensors_by_key.pop("attention_mask", None))
        if isinstance(labels := tensors_by_key.get("labels"), Tensor):
            tensors_by_key["shift_labels"] = torch.nn.functional.pad(
                labels, (0, 1), value=IGNORED
            )[:, 1:]
        cut = {}
        for tensor_name, batch_value in tensors_by_key.items():
            if isinstance(batch_value, Tensor):
                cut[tensor_name] = self._split_tensor(tensor_name, batch_value, length)
        # a model computes its loss only if it gets labels, and then reads shift_labels
        if "shift_labels" in cut:
            cut["labels"] = cut["shift_labels"]
        rank_parts = []
        for n in range(self.comm.size):
            rank_parts.append(
                {
                    tensor_name: cut[tensor_name][n]
                    if tensor_name in cut
                    else tensors_by_key[tensor_name]
                    for tensor_name in {**tensors_by_key, **cut}
                }
            )
        return rank_parts

    def _checked_length(self, tokens: Tensor, name: str) -> int:
        size = self.comm.size
        length = tokens.shape[1] if tokens.ndim > 1 else 0
        if length % size or length < 2 * size:
            raise DataError(
                f"{name} of shape {tuple(tokens.shape)} cannot be split into {size} equal parts of at least 2 tokens (sp_size={size}). Pad sequences, with labels of {IGNORED}: pad_to_multiple_of={size} in a collator of transformers."
            )
        if self.length is not None and length != self.length:
            raise DataError(
                f"a batch has sequences of {length} tokens, but sp_seq_length={self.length} and sp_seq_length_is_variable=False require that length. Pad the sequences, or set sp_seq_length_is_variable=True."
            )
        return length

    def _split_tensor(self, key: str, value: Tensor, length: int) -> list[Tensor]:
        if value.ndim < 2 or value.shape[1] != length:
            raise DataError(
                f"{key} of shape {tuple(value.shape)} has no dimension 1 of {length} tokens, so it is unclear how to split it. Remove it from the batch, or add that dimension."
            )
        return [chunk.contiguous() for chunk in value.chunk(self.comm.size, 1)]


def _check_padding(mask: Any) -> None:
    """Raise unless padding is on the right.

    Right padding needs no mask: no token attends ahead, and the loss ignores the labels of padding.
    """
    if mask is None:
        return
    if mask.ndim != 2 or bool((mask[:, 1:] > mask[:, :-1]).any()):
        raise DataError(
            f"attention_mask of shape {tuple(mask.shape)} masks tokens before unmasked ones, but with sp_size > 1 attention uses no mask. Pad on the right (tokenizer.padding_side = 'right')."
        )


class SequenceShardSource(OuterSource):
    """Shards of the sequences of every process of a group, in turn; a position counts shards."""

    def __init__(self, inner: BatchSource, cut: SequenceSplitter) -> None:
        super().__init__(inner)
        self._cut = cut

    def steps(self) -> int | None:
        steps = self._inner.steps()
        if steps is None:
            return None
        return steps * self._cut.comm.size

    def open(self, position: Position) -> Iterator[Item]:
        """Return the shards from `at` on. Ranks: the group."""
        rounds, num_returned = divmod(position.consumed, self._cut.comm.size)
        items = self._inner.open(
            self._inner.skipped(replace(position, consumed=0), rounds)
        )
        return islice(self._parts(items), num_returned, None)

    def reached(self, start: Position, steps: int, source_state: Any) -> Position:
        return replace(start, consumed=start.consumed + steps)

    def skipped(self, start: Position, num_batches: int) -> Position:
        return self.reached(start, num_batches, None)

    def copied(self, even: bool | None = None) -> SequenceShardSource:
        return SequenceShardSource(self._inner.copied(even), self._cut)

    def _parts(self, items: Iterator[Item]) -> Iterator[Item]:
        """Yield rounds of shards; members without batches left still get shards of the other members' last batches."""
        cut = self._cut
        comm = self._cut.comm
        while True:
            own_shards, error = self._split_next_batch(items, cut.parts)
            gathered = comm.all_gather_object(
                (
                    own_shards,
                    None if error is None else f"{type(error).__name__}: {error}",
                )
            )
            if error is not None:
                raise error
            if failed := next(
                (
                    f"rank {rank}: {words}"
                    for rank, (_, words) in zip(comm.ranks, gathered, strict=True)
                    if words
                ),
                None,
            ):
                raise DataError(
                    f"another process of the same sequences failed to read its next batch: {failed}. Every process of the group stops here; fix that error first."
                )
            round_shards = []
            for shards, _ in gathered:
                if shards is not None:
                    round_shards.append(shards[comm.rank])
            if not round_shards:
                return
            for shard in round_shards:
                cut.lengths.add(shard["position_ids"].shape[1])
                yield shard, None, False, None

    @staticmethod
    def _split_next_batch(
        items: Iterator[Item], split_batch: Callable[[Any], list[dict[str, Any]]]
    ) -> tuple[list[dict[str, Any]] | None, Exception | None]:
        """Return the shards of this process's next batch (None at the end), or the error raised instead."""
        try:
            item = next(items, None)
            return None if item is None else split_batch(item[0]), None
        # any error of the user's dataset must reach the processes that wait
        except Exception as error:
            return None, error
