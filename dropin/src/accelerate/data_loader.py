"""Prepared loaders with the established names: DataLoaderShard reads its share, DataLoaderDispatcher is given it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler

from accelerate import ambient
from accelerate.ambient import AMBIENT
from accelerate.data_samplers import (
    BatchSamplerShard,
    IterableDatasetShard,
    SeedableRandomSampler,
    SkipBatchSampler,
    sampler_of,
)
from accelerate.logging import get_logger
from accelerate.quirks import SHUFFLE_FOLLOWS_TORCH, STREAMS_ARE_DISPATCHED, kept
from accelerate.utils.operations import concatenate, find_batch_size, slice_tensors
from accelerate.utils.random import synchronize_rng_states
from hasten import trees
from hasten.comm import ops
from hasten.data.skip import skip_first_batches as skip_plain
from hasten.optim.clock import LoaderCursor, StepClock

__all__ = [
    "BatchSamplerShard",
    "DataLoaderAdapter",
    "DataLoaderDispatcher",
    "DataLoaderShard",
    "DataLoaderStateMixin",
    "IterableDatasetShard",
    "SeedableRandomSampler",
    "SkipBatchSampler",
    "SkipDataLoader",
    "get_sampler",
    "prepare_data_loader",
    "skip_first_batches",
]
logger = get_logger(__name__)
# Any in this file: batches, datasets and samplers are the user's own.
_KEPT = [
    "num_workers",
    "collate_fn",
    "pin_memory",
    "timeout",
    "worker_init_fn",
    "multiprocessing_context",
    "generator",
    "prefetch_factor",
    "persistent_workers",
    "pin_memory_device",
    "in_order",
]


def get_sampler(dataloader: Any) -> Any:
    """The sampler that decides a loader's order."""
    if dataloader.batch_sampler is None:
        return dataloader.sampler
    return sampler_of(dataloader.batch_sampler)


class Progress:
    """Where a loader stands; loaders made by skipping share it."""

    def __init__(self, iteration: int = 0) -> None:
        self.iteration = iteration
        self.batch = 0
        self.resume_at = 0
        self.order: torch.Tensor | None = None
        """The generator's state when the epoch began."""
        self.next_order: torch.Tensor | None = None


class DataLoaderStateMixin:
    """What GradientState reads of a loader that is being iterated."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.end_of_dataloader = False
        cls.remainder = -1

    end_of_dataloader: bool = False
    remainder: int = -1

    def reset(self) -> None:
        """Begin again."""
        self.end_of_dataloader = False
        self.remainder = -1

    def begin(self) -> None:
        """Become the innermost loader."""
        self.reset()
        if not getattr(self, "_drop_last", False):
            length = getattr(self, "total_dataset_length", None)
            total = getattr(self, "total_batch_size", None)
            if length is not None and total:
                self.remainder = length % total
        AMBIENT.loaders.append(self)

    def end(self) -> None:
        """Stop being the innermost loader."""
        for index in range(len(AMBIENT.loaders) - 1, -1, -1):
            if AMBIENT.loaders[index] is self:
                del AMBIENT.loaders[index]
                return


class DataLoaderAdapter(DataLoader[Any]):
    """A DataLoader with the constructor prepared loaders share."""

    def __init__(
        self, dataset: Any, use_stateful_dataloader: bool = False, batch_sampler: Any = None, **kwargs: Any
    ) -> None:
        self.use_stateful_dataloader = use_stateful_dataloader
        if batch_sampler is not None:
            kwargs = {
                key: value
                for key, value in kwargs.items()
                if key not in ("batch_size", "shuffle", "sampler", "drop_last")
            }
            kwargs["batch_sampler"] = batch_sampler
        super().__init__(dataset, **kwargs)

    @property
    def base_dataloader(self) -> DataLoader[Any]:
        """The loader below: itself."""
        return self


class _Prepared(DataLoaderStateMixin, DataLoaderAdapter):
    """What both prepared loaders share: position, epoch, end, and the clock that watches them."""

    def __init__(self, dataset: Any, iteration: int = 0, skip_batches: int = 0, **kwargs: Any) -> None:
        super().__init__(dataset, **kwargs)
        self.skip_batches = skip_batches
        self.cursor = LoaderCursor()
        self.clock: StepClock | None = None
        self.progress = Progress(iteration)
        self.num_processes = 1
        self.process_index = 0
        self.split_batches = False
        self.even_batches = True
        self.device: torch.device | None = None
        self._drop_last = False
        self._non_blocking = False
        self.synchronized_generator: torch.Generator | None = None

    @property
    def iteration(self) -> int:
        """The epoch that begins next, or is being read."""
        return self.progress.iteration

    @iteration.setter
    def iteration(self, value: int) -> None:
        self.progress.iteration = value

    def set_epoch(self, epoch: int) -> None:
        """Begin at `epoch` when iterated next."""
        self.progress.iteration = epoch
        targets: tuple[Any, ...] = (get_sampler(self), self.batch_sampler, self.dataset)
        for target in targets:
            if callable(getattr(target, "set_epoch", None)) and not isinstance(target, BatchSamplerShard):
                target.set_epoch(epoch)

    @property
    def total_dataset_length(self) -> int | None:
        """The samples in the dataset, when that is known."""
        whole: Any = self.dataset.dataset if isinstance(self.dataset, IterableDatasetShard) else self.dataset
        try:
            return len(whole)
        except TypeError:
            return None

    @property
    def total_batch_size(self) -> int:
        """Samples that all processes together take in one step."""
        size = getattr(self.batch_sampler, "batch_size", None) or self.batch_size or 1
        return int(size if self.split_batches else size * self.num_processes)

    @contextmanager
    def _watched(self) -> Iterator[None]:
        """A block in which this is the loader being read; its end is told however the loop is left."""
        progress = self.progress
        generator = self.synchronized_generator
        if progress.next_order is not None and generator is not None:
            generator.set_state(progress.next_order)
        progress.next_order = None
        progress.order = None if generator is None else generator.get_state()
        self.set_epoch(progress.iteration)
        cursor = self.cursor
        cursor.epoch, cursor.batch, cursor.at_end, cursor.num_real, cursor.num_rows = (
            progress.iteration,
            0,
            False,
            None,
            None,
        )
        progress.batch = 0
        self.begin()
        try:
            with (self.clock or ambient.clock()).watching(cursor):
                yield
        finally:
            self.end()
            progress.iteration += 1
            progress.batch = progress.resume_at = 0

    def _hand(self, batch: Any, last: bool) -> Any:
        """Move the cursor to this batch, and the batch to the device."""
        cursor, progress = self.cursor, self.progress
        cursor.batch += 1
        progress.batch += 1
        cursor.at_end = self.end_of_dataloader = last
        if self.device is not None:
            batch = trees.to_device(batch, self.device, self._non_blocking)
        return batch

    def state_dict(self) -> dict[str, Any]:
        """Where the loop stands."""
        progress = self.progress
        order = progress.order if progress.batch else None
        return {
            "iteration": progress.iteration,
            "batch": progress.batch,
            "order": order,
            "_iterator_finished": progress.batch == 0,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go back to the epoch a state was taken in and, with use_stateful_dataloader, to the batch."""
        progress = self.progress
        progress.iteration = int(state_dict["iteration"])
        if self.use_stateful_dataloader:
            progress.resume_at = int(state_dict["batch"])
            progress.next_order = state_dict.get("order")

    def skipping(self, num_batches: int) -> Any:
        """The same loader without its first batches; it shares this loader's position."""
        loader = copy.copy(self)
        changed: dict[str, Any] = {"_iterator": None, "cursor": LoaderCursor()}
        if (
            self.batch_sampler is not None
            and not isinstance(self.dataset, IterableDataset)
            and type(self) is DataLoaderShard
        ):
            changed["batch_sampler"] = SkipBatchSampler(self.batch_sampler, num_batches)
        else:
            changed["skip_batches"] = self.skip_batches + num_batches
        loader.__dict__.update(changed)
        return loader

    def __len__(self) -> int:
        return max(super().__len__() - self.skip_batches, 0)


class DataLoaderShard(_Prepared):
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
            following = next(batches, _NONE)
            number = 0
            while following is not _NONE:
                batch, following = following, next(batches, _NONE)
                number += 1
                if number > skip:
                    yield self._hand(batch, following is _NONE)
                else:
                    self.progress.batch += 1


_NONE = object()


class DataLoaderDispatcher(_Prepared):
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
        rounds = self._rounds() if world.rank == 0 else None
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

    def _rounds(self) -> Iterator[list[Any]]:
        """The parts of all processes, step by step, from the main process's own loader."""
        size = self.num_processes
        batches = super().__iter__()
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
            batch = next(batches, _NONE)
            if batch is _NONE:
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


def skip_first_batches(dataloader: Any, num_batches: int = 0) -> Any:
    """The loader without its first `num_batches`; every setting is kept."""
    if isinstance(dataloader, _Prepared):
        return dataloader.skipping(num_batches)
    return skip_plain(dataloader, num_batches)


def prepare_data_loader(
    dataloader: DataLoader[Any],
    device: torch.device | None = None,
    num_processes: int | None = None,
    process_index: int | None = None,
    split_batches: bool = False,
    put_on_device: bool = False,
    rng_types: Any = None,
    dispatch_batches: bool | None = None,
    even_batches: bool = True,
    slice_fn_for_dispatch: Callable[..., Any] | None = None,
    use_seedable_sampler: bool = False,
    data_seed: int | None = None,
    non_blocking: bool = False,
    use_stateful_dataloader: bool = False,
    torch_device_mesh: Any = None,
) -> DataLoader[Any]:
    """The loader, reading this process's share. Ranks: every rank."""
    stream = isinstance(dataloader.dataset, IterableDataset)
    if dispatch_batches is None:
        dispatch_batches = put_on_device and stream and kept(STREAMS_ARE_DISPATCHED)
    if dispatch_batches and not put_on_device:
        raise ValueError("Using `dispatch_batches=True` requires `put_on_device=True`.")
    here = ambient.start()
    size = here.world.size if num_processes is None else num_processes
    index = here.world.rank if process_index is None else process_index
    if split_batches:
        _check_split(dataloader, size)
    dataset, batch_sampler = dataloader.dataset, dataloader.batch_sampler
    sampler = get_sampler(dataloader)
    if isinstance(sampler, RandomSampler) and use_seedable_sampler and type(sampler) is not SeedableRandomSampler:
        sampler = _seedable(sampler, data_seed)
        batch_sampler = _with_sampler(batch_sampler, sampler)
    generator = _shared_generator(dataloader, sampler, size, use_stateful_dataloader)
    if size > 1 and not dispatch_batches:
        dataset, batch_sampler = _sharded(dataloader, batch_sampler, stream, size, index, split_batches, even_batches)
    kwargs = {name: getattr(dataloader, name) for name in _KEPT if hasattr(dataloader, name)}
    if not kwargs.get("num_workers"):
        kwargs.pop("prefetch_factor", None)
    kwargs |= _batching(dataloader, batch_sampler, sampler, stream, size, split_batches, dispatch_batches)
    options = {
        "_drop_last": bool(dataloader.drop_last),
        "_non_blocking": non_blocking,
        "use_stateful_dataloader": use_stateful_dataloader,
    }
    if dispatch_batches:
        loader: _Prepared = DataLoaderDispatcher(
            dataset, split_batches=split_batches, slice_fn=slice_fn_for_dispatch, **options, **kwargs
        )
        loader.num_processes, loader.process_index = size, index
        loader.device = device if put_on_device else None
    else:
        types = (
            list(rng_types or ())
            if generator is not None or not rng_types
            else [t for t in rng_types if str(t) != "generator"]
        )
        loader = DataLoaderShard(
            dataset,
            device=device if put_on_device else None,
            rng_types=types or None,
            synchronized_generator=generator,
            **options,
            **kwargs,
        )
        loader.num_processes, loader.process_index = size, index
        loader.split_batches = split_batches
    loader.even_batches = even_batches
    if isinstance(dataset, IterableDatasetShard):
        loader.even_batches = True
    return loader


def _check_split(dataloader: DataLoader[Any], size: int) -> None:
    batch = (
        dataloader.batch_size
        if dataloader.batch_size is not None
        else getattr(dataloader.batch_sampler, "batch_size", None)
    )
    if batch is not None and batch > 1 and batch % size:
        raise ValueError(
            f"To use a `DataLoader` in `split_batches` mode, the batch size ({batch}) "
            f"needs to be a round multiple of the number of processes ({size})."
        )


def _seedable(sampler: RandomSampler, data_seed: int | None) -> SeedableRandomSampler:
    generator = sampler.generator
    return SeedableRandomSampler(
        data_source=sampler.data_source,
        replacement=sampler.replacement,
        num_samples=sampler._num_samples,
        generator=generator if generator is not None else torch.Generator(device=torch.get_default_device()),
        data_seed=data_seed,
    )


def _with_sampler(batch_sampler: Any, sampler: Any) -> Any:
    if batch_sampler is None:
        return None
    changed = copy.copy(batch_sampler)
    changed.sampler = sampler
    return changed


def _shared_generator(dataloader: DataLoader[Any], sampler: Any, size: int, stateful: bool) -> torch.Generator | None:
    """The generator that orders the loader, made where ranks would draw differently."""
    assert kept(SHUFFLE_FOLLOWS_TORCH)
    if isinstance(dataloader.dataset, IterableDataset):
        found = getattr(dataloader.dataset, "generator", None)
        return found if isinstance(found, torch.Generator) else None
    if not isinstance(sampler, RandomSampler):
        found = getattr(sampler, "generator", None)
        return found if isinstance(found, torch.Generator) else None
    if sampler.generator is None and (size > 1 or stateful):
        sampler.generator = torch.Generator(device=torch.get_default_device())
        sampler.generator.manual_seed(int(torch.empty((), dtype=torch.int64).random_().item()))
    generator: torch.Generator | None = sampler.generator
    return generator


def _sharded(
    dataloader: DataLoader[Any], batch_sampler: Any, stream: bool, size: int, index: int, split: bool, even: bool
) -> tuple[Any, Any]:
    dataset: Any = dataloader.dataset
    if not stream:
        if batch_sampler is None:
            batch_sampler = BatchSampler(dataloader.sampler, 1, False)
        return dataset, BatchSamplerShard(batch_sampler, size, index, split, even)
    shards = getattr(dataset, "num_shards", None) or getattr(dataset, "n_shards", 0)
    if callable(getattr(dataset, "shard", None)) and isinstance(shards, int) and shards > size:
        return dataset.shard(num_shards=size, index=index), batch_sampler
    return (
        IterableDatasetShard(
            dataset,
            batch_size=dataloader.batch_size or 1,
            drop_last=bool(dataloader.drop_last),
            num_processes=size,
            process_index=index,
            split_batches=split,
        ),
        batch_sampler,
    )


def _batching(
    dataloader: DataLoader[Any],
    batch_sampler: Any,
    sampler: Any,
    stream: bool,
    size: int,
    split: bool,
    dispatch: bool | None,
) -> dict[str, Any]:
    """How the prepared loader forms batches: as torch's DataLoader takes it."""
    if stream:
        batch = dataloader.batch_size
        if batch is not None and split and not dispatch:
            batch //= size
        return {"batch_size": batch, "drop_last": bool(dataloader.drop_last) if batch is not None else False}
    if dataloader.batch_sampler is None:
        if isinstance(batch_sampler, BatchSamplerShard):
            return {"sampler": _Unbatched(batch_sampler), "batch_size": None}
        return {"sampler": sampler if sampler is not None else dataloader.sampler, "batch_size": None}
    return {"batch_sampler": batch_sampler}


class _Unbatched:
    """The items of one-item batches, for loaders that do not batch."""

    def __init__(self, batches: BatchSamplerShard) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[Any]:
        return (batch[0] for batch in self.batches)

    def __len__(self) -> int:
        return len(self.batches)
