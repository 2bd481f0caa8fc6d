"""Samplers that give each process its share of a user's batches."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from itertools import cycle, islice
from typing import Any

import torch
from torch.utils.data import BatchSampler, IterableDataset, RandomSampler

from accelerate._impl.surface.homes import settle
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

    def __len__(self) -> int:
        total = len(self.batch_sampler)
        if self.split_batches:
            return total
        if self.drop_last:
            return total // self.num_processes
        if self.even_batches:
            return math.ceil(total / self.num_processes)
        return total // self.num_processes + (self.process_index < total % self.num_processes)

    def __iter__(self) -> Iterator[list[Any]]:
        return self._split() if self.split_batches else self._every_nth()

    def _split(self) -> Iterator[list[Any]]:
        head: list[Any] = []
        size = self.batch_size
        for batch in self.batch_sampler:
            size = len(batch) if size is None else size
            if not head:
                head = list(batch)
            part = size // self.num_processes
            start = part * self.process_index
            if len(batch) < size and self.even_batches:
                batch = [*batch, *islice(cycle(head), size - len(batch))]
            mine = batch[start : start + part]
            if mine:
                yield mine

    def _every_nth(self) -> Iterator[list[Any]]:
        head: list[list[Any]] = []
        round_: list[list[Any]] = []
        for batch in self.batch_sampler:
            if len(head) < self.num_processes:
                head.append(batch)
            round_.append(batch)
            full = self.batch_size is None or len(batch) == self.batch_size
            if full and len(round_) == self.num_processes:
                yield round_[self.process_index]
                round_ = []
        if not round_ or self.drop_last:
            return
        if not self.even_batches:
            if self.process_index < len(round_):
                yield round_[self.process_index]
        elif self.batch_size is None:
            yield [*round_, *islice(cycle(head), self.num_processes)][self.process_index]
        else:
            yield self._filled(round_, head)

    def _filled(self, round_: list[list[Any]], head: list[list[Any]]) -> list[Any]:
        """This process's batch of the last, short round, filled from the beginning of the epoch."""
        # quirk: LAST_BATCH_IS_FULL
        rows = [row for batch in round_ for row in batch]
        first = cycle([row for batch in head for row in batch])
        rows.extend(islice(first, self.batch_size * self.num_processes - len(rows)))
        start = self.batch_size * self.process_index
        return rows[start : start + self.batch_size]


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
    def _step(self) -> int:
        return self.batch_size if self.split_batches else self.batch_size * self.num_processes

    def __len__(self) -> int:
        size = self._step
        rounds = len(self.dataset) // size if self.drop_last else math.ceil(len(self.dataset) / size)
        return rounds * (size // self.num_processes)

    def __iter__(self) -> Iterator[Any]:
        part = self._step // self.num_processes
        mine = slice(self.process_index * part, (self.process_index + 1) * part)
        _seed_epoch(self.dataset, getattr(self, "epoch", None))
        rows, head = iter(self.dataset), list[Any]()
        while round_ := list(islice(rows, self._step)):
            if len(round_) < self._step and self.drop_last:
                return
            head = head or list(round_)
            round_.extend(islice(cycle(head), self._step - len(round_)))
            yield from round_[mine]


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
