"""Loaders that leave out their first batches: `skip_first_batches`."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

from torch.utils.data import BatchSampler, DataLoader

from hasten.data.loader import Loader
from hasten.data.source import copy_loader
from hasten.errors import ConfigError

# Any in this file: batches and indices are objects of the user.


class SkippedBatches(BatchSampler):
    """The user's batch sampler without its first batches."""

    def __init__(self, batch_sampler: Any, skip_batches: int = 0) -> None:
        self.batch_sampler = batch_sampler
        self.skip_batches = skip_batches
        self.sampler = getattr(batch_sampler, "sampler", None)  # type: ignore[assignment] # shown as in the user's
        self.batch_size = getattr(batch_sampler, "batch_size", None)  # type: ignore[assignment]
        self.drop_last = getattr(batch_sampler, "drop_last", False)

    def __iter__(self) -> Iterator[list[Any]]:
        return islice(iter(self.batch_sampler), self.skip_batches, None)

    def __len__(self) -> int:
        return max(len(self.batch_sampler) - self.skip_batches, 0)


class SkippedItems:
    """The user's sampler, or a loader's batches, without the first ones."""

    def __init__(self, items: Any, num_items: int) -> None:
        self.items = items
        self.num_items = num_items

    def __iter__(self) -> Iterator[Any]:
        return islice(iter(self.items), self.num_items, None)

    def __len__(self) -> int:
        return max(len(self.items) - self.num_items, 0)


class SkippingLoader(DataLoader[Any]):
    """Loader over a stream that skips its first batches."""

    skip_batches: int

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override] # torch promises its private iterator class
        return islice(super().__iter__(), self.skip_batches, None)

    def __len__(self) -> int:
        return max(super().__len__() - self.skip_batches, 0)


def skip_first_batches(
    dataloader: DataLoader[Any], num_batches: int = 0
) -> DataLoader[Any]:
    """Return the loader, starting `num_batches` later in every epoch, with all settings preserved.

    Counts from the start of the epoch: on a prepared loader, a position loaded before is replaced, not added to.
    """
    if num_batches < 0:
        raise ConfigError(
            f"skip_first_batches got num_batches={num_batches}; batches can be skipped forwards only."
        )
    if isinstance(dataloader, Loader):
        return dataloader.skipping(num_batches)
    # torch's number for a stream, whose samplers carry no indices
    if dataloader._dataset_kind:
        stream = SkippingLoader.__new__(SkippingLoader)
        stream.__dict__.update(
            dataloader.__dict__, _iterator=None, skip_batches=num_batches
        )
        return stream
    if dataloader.batch_sampler is None:
        return copy_loader(
            dataloader, sampler=SkippedItems(dataloader.sampler, num_batches)
        )
    return copy_loader(
        dataloader, batch_sampler=SkippedBatches(dataloader.batch_sampler, num_batches)
    )
