"""The two ways to a share: DataLoaderShard reads it, DataLoaderDispatcher is given it by the main process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from itertools import islice
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from accelerate._impl import ambient
from accelerate._impl.loaders.base import DataLoaderAdapter, PreparedLoader
from accelerate._impl.surface.homes import settle
from accelerate._impl.tensors import concatenate, find_batch_size, slice_tensors
from accelerate._impl.views.random import synchronize_rng_states
from hasten import trees
from hasten.comm import ops
from hasten.comm.base import Comm
from hasten.data.prefetch import one_ahead
from hasten.optional import need

# Any in this file: batches, datasets and samplers are the user's own.


class DataLoaderShard(PreparedLoader):
    """A loader that reads this process's share and puts it on its device."""

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]  # torch promises its private iterator class
        if self.rng_types is not None:
            synchronize_rng_states(self.rng_types, self.synchronized_generator)
        with self._watched():
            for batch, last in one_ahead(self._skipped(super().__iter__()), self.device, self._non_blocking):
                yield self._hand(batch, last)

    @contextmanager
    def even(self, even_batches: bool) -> Iterator[None]:
        """A block in which every process takes as many batches as the others, or only those that are there."""
        targets: tuple[Any, ...] = (self, self.batch_sampler)
        before = [(one, one.even_batches) for one in targets if hasattr(one, "even_batches")]
        for one, _ in before:
            one.even_batches = even_batches
        try:
            yield
        finally:
            for one, value in before:
                one.even_batches = value

    def _picks_by_index(self) -> bool:
        return type(self).__iter__ is DataLoaderShard.__iter__ and not isinstance(self.dataset, IterableDataset)


class DataLoaderDispatcher(PreparedLoader):
    """A loader whose batches are read by the main process and handed out."""

    def __init__(
        self,
        dataset: Any,
        split_batches: bool = False,
        skip_batches: int = 0,
        slice_fn: Callable[..., Any] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(dataset, skip_batches=skip_batches, **kwargs)
        here = ambient.start()
        self.num_processes, self.process_index = here.world.size, here.world.rank
        self.split_batches, self.slice_fn = split_batches, slice_fn

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]  # torch promises its private iterator class
        world = ambient.start().world
        rounds = self._rounds(super().__iter__()) if world.rank == 0 else None
        if rounds is None:
            # what the main process's iterator draws for its workers, so that the ranks' generators agree
            torch.empty((), dtype=torch.int64).random_(generator=self.generator)
        with self._watched():
            for (batch, total), last in self._given(rounds, world):
                self.remainder = total if last else -1
                yield self._hand(batch, last)

    def _given(self, rounds: Iterator[tuple[list[Any], int]] | None, world: Comm) -> Iterator[tuple[Any, bool]]:
        """This process's parts, with the length of the whole batch, and whether they are the last."""
        if world.size > 1 or rounds is None:
            return self._scattered(rounds, world)
        mine = ((parts[0], total) for parts, total in rounds)
        return one_ahead(self._skipped(mine), self.device, self._non_blocking)

    def _scattered(self, rounds: Iterator[tuple[list[Any], int]] | None, world: Comm) -> Iterator[tuple[Any, bool]]:
        """The parts that the main process hands to this one."""
        ahead = None if rounds is None else one_ahead(self._skipped(rounds), None)
        while True:
            parts: Any = None
            if ahead is not None:
                try:
                    (each, total), last = next(ahead, (([None] * world.size, 0), True))
                    parts = [(part, total, last) for part in each]
                except Exception as error:  # the user's stream: the other ranks must not wait for it
                    ops.scatter([repr(error)] * world.size, world)
                    raise
            mine = ops.scatter(parts, world)
            if isinstance(mine, str):
                raise RuntimeError(f"reading the stream failed on the main process: {mine}")
            batch, total, last = mine
            if batch is None:
                return
            if self.device is not None:
                batch = trees.to_device(batch, self.device, self._non_blocking)
            yield (batch, total), last
            if last:
                return

    def _rounds(self, batches: Iterator[Any]) -> Iterator[tuple[list[Any], int]]:
        """The parts of all processes and their samples, step by step, from the main process's own loader."""
        size = self.num_processes
        first: Any = None
        while taken := list(islice(batches, 1 if self.split_batches else size)):
            rows = [find_batch_size(batch) or 0 for batch in taken]
            whole = len(taken) == (1 if self.split_batches else size) and len(set(rows)) == 1
            if self._drop_last and (not whole or (self.batch_size is not None and rows[0] < self.batch_size)):
                return
            total = sum(rows)
            if whole and not self.split_batches and self.slice_fn is None:
                parts = taken
                first = first if first is not None else taken[0]
            else:
                batch = concatenate(taken) if len(taken) > 1 else taken[0]
                first = first if first is not None else batch
                parts = self._cut(batch, total, first)
            yield parts, total

    def _cut(self, batch: Any, total: int, first: Any) -> list[Any]:
        """A global batch in equal parts, lengthened by the stream's first samples."""
        size = self.num_processes
        if (missing := -total % size) and self.even_batches:
            have = find_batch_size(first) or 1
            extra = [slice_tensors(first, slice(0, min(missing, have)))] * -(-missing // have)
            batch = slice_tensors(concatenate([batch, *extra]), slice(0, total + missing))
            total += missing
        part = total // size
        cut = self.slice_fn or slice_tensors
        places = [slice(rank * part, (rank + 1) * part) for rank in range(size)]
        return [cut(batch, place, process_index=rank, num_processes=size) for rank, place in enumerate(places)]

    def __len__(self) -> int:
        whole = DataLoader.__len__(self)
        if self.split_batches:
            return whole
        return whole // self.num_processes if self._drop_last else -(-whole // self.num_processes)


class SkipDataLoader(DataLoaderAdapter):
    """A plain loader without its first batches."""

    def __init__(
        self, dataset: Any, skip_batches: int = 0, use_stateful_dataloader: bool = False, **kwargs: Any
    ) -> None:
        super().__init__(dataset, use_stateful_dataloader, **kwargs)
        self.skip_batches = skip_batches

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]  # torch promises its private iterator class
        for index, batch in enumerate(super().__iter__()):
            if index >= self.skip_batches:
                yield batch

    def __len__(self) -> int:
        return max(super().__len__() - self.skip_batches, 0)


@lru_cache
def stateful(kind: type[PreparedLoader]) -> Any:
    """The kind of loader as one of torchdata's, which other libraries look for; its state is hasten's position."""
    torchdata = need(
        "torchdata.stateful_dataloader", ">=0.8", why="DataLoaderConfiguration(use_stateful_dataloader=True)"
    )
    return type(kind.__name__, (kind, torchdata.StatefulDataLoader), {"__module__": kind.__module__})


settle(__name__, "accelerate.data_loader")
