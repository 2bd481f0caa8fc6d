"""The two ways to a share: DataLoaderShard reads it, DataLoaderDispatcher is given it by the main process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from accelerate import ambient
from accelerate.loader_base import END, DataLoaderAdapter, PreparedLoader
from accelerate.utils.operations import concatenate, find_batch_size, slice_tensors
from accelerate.utils.random import synchronize_rng_states
from hasten.comm import ops
from hasten.optional import need

# Any in this file: batches, datasets and samplers are the user's own.


class DataLoaderShard(PreparedLoader):
    """A loader that reads this process's share and puts it on its device."""

    def __init__(
        self,
        dataset: Any,
        device: torch.device | None = None,
        rng_types: Any = None,
        synchronized_generator: torch.Generator | None = None,
        skip_batches: int = 0,
        use_stateful_dataloader: bool = False,
        _drop_last: bool = False,
        _non_blocking: bool = False,
        torch_device_mesh: Any = None,
        iteration: int = 0,
        **kwargs: Any,
    ) -> None:
        super().__init__(dataset, iteration, skip_batches, use_stateful_dataloader=use_stateful_dataloader, **kwargs)
        self.device = device
        self.rng_types = rng_types
        self.synchronized_generator = synchronized_generator
        self._drop_last = _drop_last
        self._non_blocking = _non_blocking

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]  # torch promises its private iterator class
        if self.rng_types is not None:
            synchronize_rng_states(self.rng_types, self.synchronized_generator)
        skip = max(self.skip_batches, self.progress.resume_at)
        with self._watched():
            batches = super().__iter__()
            following = next(batches, END)
            number = 0
            while following is not END:
                batch, following = following, next(batches, END)
                number += 1
                if number > skip:
                    yield self._hand(batch, following is END)
                else:
                    self.progress.batch += 1

    def _picks_by_index(self) -> bool:
        return type(self).__iter__ is DataLoaderShard.__iter__ and not isinstance(self.dataset, IterableDataset)


class DataLoaderDispatcher(PreparedLoader):
    """A loader whose batches are read by the main process and handed out."""

    def __init__(
        self,
        dataset: Any,
        split_batches: bool = False,
        skip_batches: int = 0,
        use_stateful_dataloader: bool = False,
        _drop_last: bool = False,
        _non_blocking: bool = False,
        slice_fn: Callable[..., Any] | None = None,
        torch_device_mesh: Any = None,
        iteration: int = 0,
        **kwargs: Any,
    ) -> None:
        super().__init__(dataset, iteration, skip_batches, use_stateful_dataloader=use_stateful_dataloader, **kwargs)
        here = ambient.start()
        self.num_processes, self.process_index = here.world.size, here.world.rank
        self.split_batches = split_batches
        self._drop_last = _drop_last
        self._non_blocking = _non_blocking
        self.slice_fn = slice_fn

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]  # torch promises its private iterator class
        world = ambient.start().world
        rounds = self._rounds(super().__iter__()) if world.rank == 0 else None
        if (
            rounds is None
        ):  # what the main process's iterator draws for its workers, so that the ranks' generators agree
            torch.empty((), dtype=torch.int64).random_(generator=self.generator)
        skip = max(self.skip_batches, self.progress.resume_at)
        with self._watched():
            number = 0
            while True:
                parts: Any = None
                if rounds is not None:
                    try:
                        parts = next(rounds, [None] * world.size)
                    except Exception as error:  # the user's stream: the other ranks must not wait for it
                        parts = [{"error": repr(error)}] * world.size
                        ops.scatter(parts, world)
                        raise
                mine = ops.scatter(parts, world)
                if mine is None:
                    return
                if "error" in mine:
                    raise RuntimeError(f"reading the stream failed on the main process: {mine['error']}")
                number += 1
                self.remainder = mine["remainder"]
                if number > skip:
                    yield self._hand(mine["batch"], mine["last"])
                else:
                    self.progress.batch += 1
                if mine["last"]:
                    return

    def _rounds(self, batches: Iterator[Any]) -> Iterator[list[Any]]:
        """The parts of all processes, step by step, from the main process's own loader."""
        size = self.num_processes
        first: Any = None
        following = self._take(batches)
        while following:
            taken, following = following, self._take(batches)
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
            last = not following
            yield [{"batch": part, "last": last, "remainder": total if last else -1} for part in parts]

    def _take(self, batches: Iterator[Any]) -> list[Any]:
        taken = []
        for _ in range(1 if self.split_batches else self.num_processes):
            batch = next(batches, END)
            if batch is END:
                break
            taken.append(batch)
        return taken

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
