"""Batches of samples of similar length: a shuffle that is sorted by length in stretches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

import torch
from torch.utils.data import Sampler

from hasten.errors import DataError

_BATCHES_SORTED: Final = 50


class LengthGroupedSampler(Sampler[int]):
    """A shuffle, as a function of seed and epoch, in which stretches of 50 batches are sorted by length.

    The longest sample of all comes first, so that memory runs out in the first step or not at all.
    """

    def __init__(self, lengths: Sequence[int], batch_size: int, seed: int = 0) -> None:
        self._lengths = torch.as_tensor(lengths)
        quarter = len(lengths) // (
            4 * batch_size
        )  # fewer batches in a stretch of few samples, or all epochs would be alike
        self._stretch = batch_size * max(1, min(quarter, _BATCHES_SORTED))
        self._seed = seed
        self._epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Draw the order of this epoch next."""
        self._epoch = epoch

    def __len__(self) -> int:
        return len(self._lengths)

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(self._seed * 1_000_003 + self._epoch)
        order = torch.randperm(len(self), generator=generator)
        parts = [
            part[self._lengths[part].argsort(descending=True, stable=True)]
            for part in torch.split(order, self._stretch)
        ]
        if len(self):
            longest = max(range(len(parts)), key=lambda index: int(self._lengths[parts[index][0]]))
            parts[0][0], parts[longest][0] = parts[longest][0].clone(), parts[0][0].clone()
        return iter(torch.cat(parts).tolist())

    def state_dict(self) -> dict[str, int]:
        """The epoch that is drawn next."""
        return {"epoch": self._epoch}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Draw the epoch of a checkpoint next."""
        self._epoch = int(state["epoch"])


def lengths_of(dataset: Any, column: str) -> list[int]:  # Any: datasets have no common base
    """The length of every sample: from its column, or counted from `input_ids`.

    Raises: DataError when samples have neither.
    """
    if column in (getattr(dataset, "column_names", None) or ()):
        return [int(length) for length in dataset[column]]
    first = dataset[0]
    if not isinstance(first, dict) or "input_ids" not in first:
        raise DataError(
            f"group_by_length=True needs to know how long samples are, but they have neither a column {column!r} nor "
            "input_ids; add one of them, set length_column_name, or leave group_by_length out."
        )
    return [len(dataset[index]["input_ids"]) for index in range(len(dataset))]
