"""Samplers that give each process its share of a user's batches."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sized
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import BatchSampler, IterableDataset, RandomSampler

from accelerate._impl.surface.homes import settle
from hasten.data.plan import plan_batches, plan_rows
from hasten.data.position import Position
from hasten.data.sampler import Assignment
from hasten.data.skip import SkippedBatches

# Any in this file: indices and samples are whatever the dataset has.


def check_split(what: str, batch_size: int | None, num_processes: int, least: int = 1) -> None:
    """Refuse batches that cannot be split equally."""
    if batch_size is not None and batch_size > least and batch_size % num_processes:
        raise ValueError(
            f"To use {what} in `split_batches` mode, the batch size ({batch_size}) needs to be a round multiple of the "
            f"number of processes ({num_processes})."
        )


class SeedableRandomSampler(RandomSampler):
    """A RandomSampler whose order is a function of seed and epoch."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        data_seed = kwargs.pop("data_seed", None)
        super().__init__(*args, **kwargs)
        self.initial_seed = data_seed if data_seed is not None else torch.random.initial_seed()
        self.epoch = 0

    def __iter__(self) -> Iterator[int]:
        # quirk: SEEDABLE_ORDER
        if self.generator is None:
            self.generator = torch.Generator()
        self.generator.manual_seed(self.epoch + self.initial_seed)
        yield from super().__iter__()
        self.set_epoch(self.epoch + 1)

    def set_epoch(self, epoch: int) -> None:
        """Begin at `epoch` when iterated next."""
        self.epoch = epoch


@dataclass(frozen=True, slots=True)
class AsDrawn:
    """What a sampler or a stream gives, drawn by every process for itself."""

    units: Any
    as_torch: bool = True

    def size(self) -> int | None:
        """Units of an epoch, when they are counted."""
        return len(self.units) if isinstance(self.units, Sized) else None

    def begin(self, at: Position) -> Position:
        """The loader remembers what is drawn from."""
        return at

    def seek(self, at: Position) -> None:
        """There is no way but to draw."""

    def draw(self, at: Position) -> Iterator[Any]:
        """The units of an epoch."""
        return iter(self.units)


class BatchSamplerShard(BatchSampler):
    """One process's part of a batch sampler: every n-th batch, or a part of each with `split_batches`."""

    def __init__(
        self,
        batch_sampler: Any,
        num_processes: int = 1,
        process_index: int = 0,
        split_batches: bool = False,
        even_batches: bool = True,
    ) -> None:
        self.batch_sampler = batch_sampler
        self.num_processes = num_processes
        self.process_index = process_index
        self.split_batches = split_batches
        self.even_batches = even_batches
        self.batch_size: Any = getattr(batch_sampler, "batch_size", None)  # None for samplers of varying size
        self.drop_last = getattr(batch_sampler, "drop_last", False)
        self.sampler = getattr(batch_sampler, "sampler", None)  # type: ignore[assignment]  # None where there is none
        if split_batches:
            check_split("`BatchSamplerShard`", self.batch_size, num_processes, least=0)

    @property
    def total_length(self) -> int:
        """Batches of all processes."""
        return len(self.batch_sampler)

    @property
    def _assignment(self) -> Assignment:
        """How batches are shared, by the settings as they are now."""
        plan = plan_batches(
            num_shards=self.num_processes,
            shard=self.process_index,
            split=self.split_batches,
            dispatch=False,
            drop_last=bool(self.drop_last),
            even=self.even_batches,
        )
        split = (self.num_processes, self.process_index) if self.split_batches else None
        return Assignment(AsDrawn(self.batch_sampler), plan, "batches", split, fill=self.batch_size)

    def __len__(self) -> int:
        return self._assignment.plan.steps(len(self.batch_sampler))

    def __iter__(self) -> Iterator[list[Any]]:
        # quirk: LAST_BATCH_IS_FULL
        return (lot[0] for lot in self._assignment.lots(Position(), ends=False))


class IterableDatasetShard(IterableDataset[Any]):
    """One process's part of a stream that every process reads whole."""

    def __init__(
        self,
        dataset: Any,
        batch_size: int = 1,
        drop_last: bool = False,
        num_processes: int = 1,
        process_index: int = 0,
        split_batches: bool = False,
    ) -> None:
        if split_batches:
            check_split("`IterableDatasetShard`", batch_size, num_processes)
        self.dataset = dataset
        self.batch_size = batch_size
        self.drop_last = drop_last
        self.num_processes = num_processes
        self.process_index = process_index
        self.split_batches = split_batches

    def set_epoch(self, epoch: int) -> None:
        """Tell the stream which epoch begins."""
        self.epoch = epoch
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)

    @property
    def _assignment(self) -> Assignment:
        plan = plan_rows(
            batch_size=self.batch_size,
            num_shards=self.num_processes,
            shard=self.process_index,
            split=self.split_batches,
            dispatch=False,
            drop_last=self.drop_last,
            even=True,
            pad="full",
        )
        return Assignment(AsDrawn(self.dataset), plan, "rows")

    def __len__(self) -> int:
        plan = self._assignment.plan
        return plan.steps(len(self.dataset)) * plan.rows

    def __iter__(self) -> Iterator[Any]:
        _seed_epoch(self.dataset, getattr(self, "epoch", None))
        for lot in self._assignment.lots(Position(), ends=False):
            yield from lot[0]


def _seed_epoch(dataset: Any, epoch: int | None) -> None:
    """Give a stream that carries a generator, and no set_epoch of its own, an order for the epoch."""
    generator = getattr(dataset, "generator", None)
    if epoch is not None and not hasattr(dataset, "set_epoch") and isinstance(generator, torch.Generator):
        generator.manual_seed(epoch)


class SkipBatchSampler(SkippedBatches):
    """A batch sampler without its first batches."""

    def __init__(self, batch_sampler: Any, skip_batches: int = 0) -> None:
        super().__init__(batch_sampler, skip_batches)
        self.batch_sampler, self.skip_batches = batch_sampler, skip_batches

    @property
    def total_length(self) -> int:
        """Batches before any are skipped."""
        return len(self.batch_sampler)


def sampler_of(batch_sampler: Any) -> Any:
    """The sampler below any number of batch samplers."""
    while isinstance(batch_sampler, (BatchSamplerShard, SkipBatchSampler)):
        batch_sampler = batch_sampler.batch_sampler
    return getattr(batch_sampler, "sampler", None)


def replace_sampler(batch_sampler: Any, sampler: Iterable[int]) -> None:
    """Put a sampler below any number of batch samplers."""
    while isinstance(batch_sampler, (BatchSamplerShard, SkipBatchSampler)):
        batch_sampler.sampler = sampler
        batch_sampler = batch_sampler.batch_sampler
    batch_sampler.sampler = sampler


settle(__name__, "accelerate.data_loader")
