"""Samplers that give each process its share of a user's batches."""

from collections.abc import Iterator, Sized
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import BatchSampler, IterableDataset, RandomSampler

from accelerate._impl.surface.messages import message
from accelerate._impl.surface.shown import shown_property
from hasten.data.batch_plan import plan_batches, plan_rows
from hasten.data.position import Position
from hasten.data.sampler import Assignment
from hasten.data.skipping import SkippedBatches

# Any in this file: indices and samples are whatever the dataset has.


def check_split(
    subject: str, batch_size: int | None, num_processes: int, min_batch_size: int = 1
) -> None:
    if (
        batch_size is not None
        and batch_size > min_batch_size
        and batch_size % num_processes
    ):
        raise ValueError(message("cannot_split", subject, batch_size, num_processes))


class SeedableRandomSampler(RandomSampler):
    """A RandomSampler whose order is a function of seed and epoch."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        data_seed = kwargs.pop("data_seed", None)
        super().__init__(*args, **kwargs)
        if data_seed is not None:
            self.initial_seed = data_seed
        else:
            self.initial_seed = torch.random.initial_seed()
        self.epoch = 0

    def __iter__(self) -> Iterator[int]:
        # quirk: SEEDABLE_ORDER
        if self.generator is None:
            self.generator = torch.Generator()
        self.generator.manual_seed(self.epoch + self.initial_seed)
        yield from super().__iter__()
        self.set_epoch(self.epoch + 1)

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


@dataclass(frozen=True, slots=True)
class AsDrawn:
    """The samples of a sampler or a stream, drawn by every process for itself."""

    units: Any

    def size(self) -> int | None:
        if isinstance(self.units, Sized):
            return len(self.units)
        return None

    def begin(self, position: Position) -> Position:
        return position

    def seek(self, position: Position) -> None:
        """There is no way but to draw."""

    def draw(self, position: Position) -> Iterator[Any]:
        return iter(self.units)


@dataclass(eq=False, repr=False)
class BatchSamplerShard(BatchSampler):
    """One process's part of a batch sampler: every n-th batch, or a part of each with `split_batches`."""

    batch_sampler: Any
    num_processes: int = 1
    process_index: int = 0
    split_batches: bool = False
    even_batches: bool = True

    def __post_init__(self) -> None:
        # None for samplers of varying size
        self.batch_size: Any = getattr(self.batch_sampler, "batch_size", None)
        self.drop_last = getattr(self.batch_sampler, "drop_last", False)
        self.sampler = getattr(self.batch_sampler, "sampler", None)  # type: ignore[assignment]  # None where there is none
        if self.split_batches:
            if self.batch_size is None:
                raise ValueError(
                    message(
                        "cannot_split", "`BatchSamplerShard`", None, self.num_processes
                    )
                )
            check_split(
                "`BatchSamplerShard`",
                self.batch_size,
                self.num_processes,
                min_batch_size=0,
            )

    total_length = shown_property(
        lambda self: len(self.batch_sampler), "Batches of all processes."
    )

    @property
    def _assignment(self) -> Assignment:
        plan = plan_batches(**_shard_plan_arguments(self), even=self.even_batches)
        if self.split_batches:
            split = (self.num_processes, self.process_index)
        else:
            split = None
        return Assignment(
            AsDrawn(self.batch_sampler), plan, "batches", split, fill=self.batch_size
        )

    def __len__(self) -> int:
        return self._assignment.plan.steps(len(self.batch_sampler))

    def __iter__(self) -> Iterator[list[Any]]:
        # quirk: LAST_BATCH_IS_FULL
        return (
            index_batch[0]
            for index_batch in self._assignment.index_batches(
                Position(), looks_ahead=False
            )
        )


@dataclass(eq=False, repr=False)
class IterableDatasetShard(IterableDataset[Any]):
    """One process's part of a stream that every process reads whole."""

    dataset: Any
    batch_size: int = 1
    drop_last: bool = False
    num_processes: int = 1
    process_index: int = 0
    split_batches: bool = False

    def __post_init__(self) -> None:
        if self.split_batches:
            check_split("`IterableDatasetShard`", self.batch_size, self.num_processes)

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)

    @property
    def _assignment(self) -> Assignment:
        plan = plan_rows(
            batch_size=self.batch_size,
            **_shard_plan_arguments(self),
            even=True,
            pad="full",
        )
        return Assignment(AsDrawn(self.dataset), plan, "rows")

    def __len__(self) -> int:
        plan = self._assignment.plan
        return plan.steps(len(self.dataset)) * plan.rows

    def __iter__(self) -> Iterator[Any]:
        generator = getattr(self.dataset, "generator", None)
        epoch = getattr(self, "epoch", None)
        if (
            epoch is not None
            and not hasattr(self.dataset, "set_epoch")
            and isinstance(generator, torch.Generator)
        ):
            # a stream without a set_epoch of its own gets an order for the epoch
            generator.manual_seed(epoch)
        for index_batch in self._assignment.index_batches(
            Position(), looks_ahead=False
        ):
            yield from index_batch[0]


def _shard_plan_arguments(
    sharded_sampler: BatchSamplerShard | IterableDatasetShard,
) -> dict[str, Any]:
    """Return the process of a part and the way batches are shared, by its attributes as they are now."""
    shard_arguments = {
        "num_shards": sharded_sampler.num_processes,
        "shard": sharded_sampler.process_index,
    }
    return {
        **shard_arguments,
        "split": sharded_sampler.split_batches,
        "drop_last": bool(sharded_sampler.drop_last),
    }


class SkipBatchSampler(SkippedBatches):
    total_length = shown_property(
        lambda self: len(self.batch_sampler), "Batches before any are skipped."
    )


def get_sampler(dataloader: Any) -> Any:
    """Return the sampler that decides a loader's order, below any number of batch samplers."""
    if dataloader.batch_sampler is None:
        return dataloader.sampler
    batch_sampler = dataloader.batch_sampler
    while isinstance(batch_sampler, (BatchSamplerShard, SkipBatchSampler)):
        batch_sampler = batch_sampler.batch_sampler
    return getattr(batch_sampler, "sampler", None)


def innermost_sampler(sampler: Any) -> Any:
    """Return the sampler of single indices below batch samplers, which may be a loader's sampler."""
    while isinstance(sampler, BatchSampler):
        sampler = sampler.sampler
    return sampler
