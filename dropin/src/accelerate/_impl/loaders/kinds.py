"""The two ways to a share: DataLoaderShard reads it, DataLoaderDispatcher is given it by the main process."""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from accelerate._impl import ambient
from accelerate._impl.loaders.base import (
    DataLoaderAdapter,
    DataLoaderStateMixin,
    PreparedLoader,
    SnapshotSource,
    torchdata_kind,
)
from accelerate._impl.loaders.torch_source import OneAhead, TorchSource
from accelerate._impl.tensors import find_batch_size, slice_tensors
from hasten import trees
from hasten.data.batch_plan import DataRanks, Padding
from hasten.data.dispatch import BatchReader, DispatchSource
from hasten.data.loader import Move, SkippingLoader, plain_move
from hasten.data.source import BatchSource, Item
from hasten.runtime.mesh_plan import BATCH

# Any in this file: batches, datasets and samplers are the user's own.


class DataLoaderShard(PreparedLoader):
    """A loader that reads this process's share and puts it on its device."""

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


@dataclass(frozen=True, slots=True)
class Dealt(BatchReader):
    """The main process's batches, one for each process; those of a step that differ in size are joined and cut again."""

    joins: bool = False
    """Whether those of every step are."""

    def _groups(self, items: Iterator[Item]) -> Iterator[list[Item]]:
        """The batches of each step, marked with the samples that they hold together."""
        for group in BatchReader._groups(self, items):
            total = sum(find_batch_size(item[0]) or 0 for item in group)
            yield [(batch, None, last, total) for batch, _, last, _ in group]

    def _parts(self, group: list[Item], first: Any) -> list[tuple[Any, Padding | None]]:
        sizes = {find_batch_size(item[0]) for item in group}
        if self.joins or self.split or len(group) < self.num_shards or len(sizes) > 1:
            return [(part, None) for part, _ in self._sliced(group, first)]
        return [(item[0], None) for item in group]


def _seats(readers: int) -> DataRanks:
    here, every = ambient.start(), range(ambient.start().world.size)
    shards = tuple(every if readers == len(every) else (here.mesh.index(rank, *BATCH) for rank in every))
    return DataRanks(shards[here.rank], readers, shards)


_SHARED = ("skip_batches", "use_stateful_dataloader", "_drop_last", "_non_blocking", "torch_device_mesh", "iteration")


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
        shared = {name: value for name, value in locals().items() if name in _SHARED}
        super().__init__(dataset, **shared, **kwargs)
        here = ambient.start()
        self.num_processes, self.process_index = here.world.size, here.world.rank
        self.split_batches, self.slice_fn = split_batches, slice_fn

    def source(self) -> BatchSource:
        """The main process's batches, dealt out where there are several processes."""
        world = ambient.start().world
        kind = SnapshotSource if self.use_stateful_dataloader and world.size == 1 else TorchSource
        inner = kind(self, None, self.followers(), reads=world.rank == 0)
        if world.size == 1:
            return inner
        size, joins = self.num_processes, self.slice_fn is not None
        reader = Dealt(size, self.split_batches, self.even_batches, self._drop_last, self._cut, joins)
        return DispatchSource(inner, reader, world, _seats(self.num_processes))

    def move(self) -> Move | None:
        """What brings batches to the device; those that are dealt out have been read ahead already."""
        device, non_blocking = self.device, self._non_blocking
        if ambient.start().world.size > 1:
            return None if device is None else plain_move(lambda batch: trees.to_device(batch, device, non_blocking))
        ahead = OneAhead(device, non_blocking)
        if self.slice_fn is None:
            return ahead
        cut = plain_move(lambda batch: self._cut(batch, slice(0, find_batch_size(batch))))
        return lambda items: ahead(cut(items))

    def _cut(self, batch: Any, rows: slice, shard: int = 0, num_shards: int = 1) -> Any:
        return (self.slice_fn or slice_tensors)(batch, rows, process_index=shard, num_processes=num_shards)

    def given(self, batch: Any) -> Any:
        """The batch; the last tells how many samples all processes have of it."""
        if self.end_of_dataloader:
            state = self.loader_iteration.source_state
            total = state if isinstance(state, int) else None
            self.remainder = total or find_batch_size(batch) or -1
        else:
            self.remainder = -1
        return batch


class SkipDataLoader(DataLoaderStateMixin, SkippingLoader, DataLoaderAdapter):
    """A plain loader without its first batches."""

    def __init__(
        self, dataset: Any, skip_batches: int = 0, use_stateful_dataloader: bool = False, **kwargs: Any
    ) -> None:
        DataLoaderAdapter.__init__(self, dataset, use_stateful_dataloader, **kwargs)
        self.skip_batches = skip_batches

    latest: Any = None

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]  # torch promises its private iterator class
        for batch in super().__iter__():
            self.latest = copy.deepcopy(torchdata_kind(self).state_dict(self)) if self.use_stateful_dataloader else None
            yield batch

    def state_dict(self) -> Any:
        """torchdata's state at the latest batch. Raises: AttributeError for a plain loader, which has none."""
        return torchdata_kind(self).state_dict(self) if self.latest is None else self.latest

    def load_state_dict(self, state_dict: Any) -> None:
        """Continue from torchdata's state."""
        self.latest = None
        torchdata_kind(self).load_state_dict(self, state_dict)
