"""Prepared loaders: hasten's own with the original's face, which read their share or are given it by the main process."""

import copy
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Self

import torch
from torch.utils.data import DataLoader

from accelerate._impl import ambient
from accelerate._impl.copying import Copyable
from accelerate._impl.environment.packages import (
    is_torchdata_stateful_dataloader_available,
)
from accelerate._impl.loaders.dealt import Dealt
from accelerate._impl.loaders.samplers import (
    BatchSamplerShard,
    IterableDatasetShard,
    get_sampler,
)
from accelerate._impl.loaders.torch_source import OneAhead, TorchSource, forward_epoch
from accelerate._impl.surface.lazy import Deferred
from accelerate._impl.surface.messages import message
from accelerate._impl.surface.shown import shown_property
from accelerate._impl.tensors import (
    find_batch_size,
    gather_object,
    send_to_device,
    slice_tensors,
)
from accelerate._impl.views.random import synchronize_rng_states
from accelerate._impl.views.state import GradientState
from hasten.data.batch_plan import DataRanks
from hasten.data.dispatch import DispatchSource
from hasten.data.loader import Loader, LoaderIteration, LoaderParts, Move
from hasten.data.position import Position
from hasten.data.skipping import SkippingLoader
from hasten.data.source import BatchSource, Item, move_on_request
from hasten.optim.clock import LoaderCursor, StepClock
from hasten.optional import need
from hasten.runtime.mesh_plan import BATCH

if TYPE_CHECKING:
    from accelerate._impl.loaders.sequence_parts import SequenceSplitter

sequence_parts = Deferred("accelerate._impl.loaders.sequence_parts")
# Any in this file: batches, datasets and samplers are the user's own.
POSITION = "_position"


class DataLoaderStateMixin:
    """The attributes that GradientState reads of an iterated loader."""

    end_of_dataloader: bool = False
    remainder: int = -1

    def reset(self) -> None:
        self.end_of_dataloader = False
        self.remainder = -1

    def begin(self) -> None:
        self.reset()
        this: Any = self
        # a length or a size that nobody knows
        with suppress(AttributeError, TypeError):
            if not this._drop_last:
                has_total_length = hasattr(self, "total_dataset_length")
                self.remainder = (
                    this.total_dataset_length if has_total_length else len(this.dataset)
                ) % this.total_batch_size
        this.gradient_state._add_dataloader(self)

    def end(self) -> None:
        this: Any = self
        this.gradient_state._remove_dataloader(self)


# which a batch sampler decides
_FORMED = {"batch_size", "shuffle", "sampler", "drop_last"}


@lru_cache
def stateful(kind: Any) -> Any:
    """Return the kind of loader as one of torchdata's, which other libraries look for."""
    torchdata = need(
        "torchdata.stateful_dataloader", ">=0.8", why="use_stateful_dataloader=True"
    )
    reduced = {
        "__reduce_ex__": lambda self, protocol: (
            _blank_instance,
            (kind,),
            self.__getstate__(),
        )
    }
    return type(
        kind.__name__,
        (kind, torchdata.StatefulDataLoader),
        {"__module__": kind.__module__, **reduced},
    )


def _blank_instance(kind: Any) -> Any:
    loader_class = stateful(kind)
    return loader_class.__new__(loader_class)


class DataLoaderAdapter(DataLoader[Any]):
    """A DataLoader with the constructor prepared loaders share; one of torchdata's with `use_stateful_dataloader`."""

    use_stateful_dataloader = False

    def __new__(
        cls, *args: Any, use_stateful_dataloader: bool = False, **kwargs: Any
    ) -> Self:
        kind: Any = cls
        if use_stateful_dataloader and not is_torchdata_stateful_dataloader_available():
            raise ImportError(message("no_torchdata"))
        adapter: Self = super().__new__(
            stateful(kind) if use_stateful_dataloader else kind
        )
        return adapter

    def __getattr__(self, name: str) -> Any:
        if name == "base_dataloader":  # on instances only
            plain = DataLoader.__new__(torchdata_kind(self))
            plain.__dict__.update(self.__dict__)
            return plain
        if name == "gradient_state":
            return GradientState()
        if name == "dl_state_dict" and self.__dict__.get("use_stateful_dataloader"):
            return self.state_dict()
        raise AttributeError(
            f"'{type(self).__name__}' object has no attribute '{name}'"
        )

    def __init__(
        self,
        dataset: Any,
        use_stateful_dataloader: bool = False,
        batch_sampler: Any = None,
        **kwargs: Any,
    ) -> None:
        self.use_stateful_dataloader = use_stateful_dataloader
        if batch_sampler is not None:
            kwargs = {
                **{name: kwargs[name] for name in kwargs.keys() - _FORMED},
                "batch_sampler": batch_sampler,
            }
        if not use_stateful_dataloader:
            super().__init__(dataset, **kwargs)
            return
        # torchdata 0.11 makes a call that torch has deprecated
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="'set_vital' is deprecated")
            super().__init__(dataset, **kwargs)


class SnapshotSource(TorchSource):
    """Source with torchdata's state after each batch, in a list: the last batch's becomes the state after the stream's end."""

    def open(self, position: Position) -> Iterator[Item]:
        """Yield the batches from `at` on; those behind a position of hasten's have none."""
        if position.consumed:
            yield from super().open(position)
            return
        snapshot_state: list[Any] = [None]
        for batch, padding, last, _ in super().open(position):
            snapshot_state = [
                copy.deepcopy(torchdata_kind(self.engine).state_dict(self.engine))
            ]
            yield batch, padding, last, snapshot_state
        snapshot_state[0] = copy.deepcopy(
            torchdata_kind(self.engine).state_dict(self.engine)
        )


def torchdata_kind(loader: Any) -> Any:
    torchdata_bases = (
        base_class
        for base_class in type(loader).__mro__
        if base_class.__module__.startswith("torchdata")
    )
    return next(torchdata_bases, DataLoader)


class PreparedLoader(Copyable, DataLoaderStateMixin, Loader, DataLoaderAdapter):
    """hasten's loader with the original's constructor and attributes, read through torch's own iteration."""

    belongs_to_run = ("clock", "_iterator", "cut")

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
        DataLoaderAdapter.__init__(self, dataset, use_stateful_dataloader, **kwargs)
        self.device = device
        self.rng_types = rng_types
        self.order_generator = self.synchronized_generator = synchronized_generator
        self.skip_batches = skip_batches
        self._drop_last = _drop_last
        self._non_blocking = _non_blocking
        self.loader_iteration = LoaderIteration(Position(epoch=iteration))
        self.place_in_epoch = LoaderCursor(nests=True)
        self.clock: StepClock | None = None
        # torchdata's state at the batch in use, in a list that the source changes
        self.latest: list[Any] | None = None
        # how sequences are cut, where processes share them
        self.cut: SequenceSplitter | None = None
        self.num_processes = 1
        self.process_index = 0
        self.split_batches = False
        self.even_batches = True

    drawn_from_torch: Any = None
    """The sampler that draws from torch's generator, if its indices are shared by several ranks."""

    @property
    def parts(self) -> LoaderParts:  # type: ignore[override]  # put together of attributes, which clients change
        return LoaderParts(
            source=self.source()
            if self.cut is None
            else sequence_parts.SequenceShardSource(self.source(), self.cut),
            clock=self.clock or ambient.run_clock(),
            iteration=self.loader_iteration,
            move=self.move(),
            shard=self.process_index,
            total_batch_size=self.total_batch_size,
            cursor=self.place_in_epoch,
            skip=self.skip_batches,
        )

    def followers(self) -> tuple[Any, ...]:
        return tuple(
            sampler
            for sampler in (get_sampler(self), self.batch_sampler)
            if not isinstance(sampler, BatchSamplerShard)
        )

    get_sampler = get_sampler

    def set_sampler(self, sampler: Any) -> None:
        batch_sampler: Any = self.batch_sampler
        while batch_sampler is not None:
            batch_sampler.sampler, batch_sampler = (
                sampler,
                getattr(batch_sampler, "batch_sampler", None),
            )

    def source(self) -> BatchSource:
        source_class = SnapshotSource if self.use_stateful_dataloader else TorchSource
        return source_class(self, self.order_generator, self.followers())

    def move(self) -> Move | None:
        return OneAhead(self.device, self.put)

    def put(self, batch: Any) -> Any:
        return send_to_device(batch, self.device, non_blocking=self._non_blocking)

    def rejoin(self) -> None:
        """Be watched by the clock that the loader copied is watched by, or by the latest Accelerator's."""
        vars(self).setdefault("clock", None)
        vars(self).setdefault("cut", None)
        vars(self)["_iterator"] = None

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]  # torch promises its private iterator class
        if self.rng_types is not None:
            synchronize_rng_states(self.rng_types, self.synchronized_generator)
        if self.drawn_from_torch is not None:
            self.agree()
        batches: Any = iter(())
        self.begin()
        try:
            batches = super().__iter__()
            for batch in batches:
                self.end_of_dataloader = self.place_in_epoch.at_end
                source_state = self.loader_iteration.source_state
                self.latest = source_state if isinstance(source_state, list) else None
                yield self.given(batch)
            # resumed by a position, which torchdata knows nothing of
            if self.latest is None:
                self.latest = [self.saved_state()]
        finally:  # however the loop is left
            batches.close()
            self.end()
            if not self.loader_iteration.fresh:
                self.loader_iteration.place(self.loader_iteration.upcoming())

    def agree(self) -> None:
        """Give the sampler a generator with the first rank's state if torch's generators differ between ranks. Ranks: every rank."""
        states = gather_object([torch.get_rng_state()])
        if any(not torch.equal(rank_state, states[0]) for rank_state in states):
            self.order_generator = self.synchronized_generator = (
                self.drawn_from_torch.generator
            ) = torch.Generator()
            self.order_generator.set_state(states[0])
            self.drawn_from_torch = None

    def given(self, batch: Any) -> Any:
        return batch

    iteration = shown_property(
        "epoch",
        "The current or next epoch.",
        lambda self, epoch: self.loader_iteration.set_epoch(epoch),
    )

    def set_epoch(self, epoch: int) -> None:
        super().set_epoch(epoch)
        for target in (*self.followers(), self.dataset):
            forward_epoch(target, epoch)

    @property
    def total_dataset_length(self) -> int | None:  # type: ignore[override]  # streams may have none
        if isinstance(self.dataset, IterableDatasetShard):
            full_dataset: Any = self.dataset.dataset
        else:
            full_dataset = self.dataset
        try:
            return len(full_dataset)
        except TypeError:
            return None

    @property
    def total_batch_size(self) -> int | None:
        """Samples that all processes together take in one step; None if batches vary."""
        batch_size = getattr(self.batch_sampler, "batch_size", None) or self.batch_size
        # processes that share a batch
        together = 1 if self.cut is None else self.cut.comm.size
        return batch_size and int(
            batch_size
            if self.split_batches
            else batch_size * self.num_processes // together
        )

    def saved_state(self, has_trained: bool = False) -> dict[str, Any]:
        """Return the loop's position, which checkpoints hold."""
        yielded = self.loader_iteration.start.batches + self.loader_iteration.steps
        iterator_state = {"_num_yielded": yielded, "_iterator_finished": yielded == 0}
        return {**super().saved_state(), "batches": yielded, **iterator_state}

    def state_dict(self) -> dict[str, Any]:
        """Return the loop's position; torchdata's own state, as of the batch in use, for loaders of torchdata's."""
        if not self.use_stateful_dataloader or (
            self.latest is None
            and self.loader_iteration.start.batches + self.loader_iteration.steps
        ):
            return self.saved_state()
        loader_state: dict[str, Any] = dict(
            torchdata_kind(self).state_dict(self)
            if self.latest is None
            else self.latest[0]
        )
        # its samplers' random states are no part of torchdata's state: the order goes on from hasten's position
        if self.order_generator is None:
            return loader_state
        return {**loader_state, POSITION: self.saved_state()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go back to the epoch a state was taken in and its order and, with use_stateful_dataloader, to the batch."""
        position = state_dict.get(POSITION, state_dict)
        if "unit" not in position:
            self.loader_iteration.place(
                self.loader_iteration.upcoming().begin(self.epoch)
            )
            self.latest = [dict(state_dict)]
            torchdata_kind(self).load_state_dict(self, dict(state_dict))
            return
        # quirk: POSITION_IS_OPT_IN
        if self.use_stateful_dataloader:
            beginning = {}
        else:
            beginning = {"consumed": 0, "batches": 0}
        self.latest = None
        super().load_state_dict({**position, **beginning})

    def skipping(self, num_batches: int) -> Any:
        """Return the same loader without its first batches; it shares this loader's position."""
        loader = copy.copy(self)
        loader.__dict__.update(
            clock=self.clock, cut=self.cut, skip_batches=self.skip_batches + num_batches
        )
        return loader

    outlasts_others = False
    """Whether the current batch is one that another process does not have."""

    @contextmanager
    def even(self, even_batches: bool) -> Iterator[None]:
        """A block in which batches are shared with this `even_batches`, where this process itself takes its share."""
        yield


class DataLoaderShard(PreparedLoader):
    """A loader that reads this process's share and puts it on its device."""

    @property
    def outlasts_others(self) -> bool:  # type: ignore[override]  # known at the end only
        sampler = self.batch_sampler
        if (
            not (self.end_of_dataloader and isinstance(sampler, BatchSamplerShard))
            or sampler.even_batches
        ):
            return False
        return len(sampler) > len(
            replace(sampler, process_index=sampler.num_processes - 1)
        )

    @contextmanager
    def even(self, even_batches: bool) -> Iterator[None]:
        """A block in which every process takes as many batches as the others, or only those that are there."""
        targets: tuple[Any, ...] = (self, self.batch_sampler)
        previous_values = []
        for target in targets:
            if hasattr(target, "even_batches"):
                previous_values.append((target, target.even_batches))
        for target, _ in previous_values:
            target.even_batches = even_batches
        try:
            yield
        finally:
            for target, previous_value in previous_values:
                target.even_batches = previous_value


def _data_ranks(readers: int) -> DataRanks:
    process = ambient.start()
    all_ranks = range(ambient.start().world.size)
    shards = tuple(
        all_ranks
        if readers == len(all_ranks)
        else (process.mesh.index(rank, *BATCH) for rank in all_ranks)
    )
    return DataRanks(shards[process.rank], readers, shards)


_SHARED = (
    "skip_batches",
    "use_stateful_dataloader",
    "_drop_last",
    "_non_blocking",
    "torch_device_mesh",
    "iteration",
)


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
        process = ambient.start()
        self.num_processes = process.world.size
        self.process_index = process.world.rank
        self.split_batches = split_batches
        self.slice_fn = slice_fn or slice_tensors
        self.torch_device_mesh = torch_device_mesh

    def source(self) -> BatchSource:
        """Return the main process's batches, dealt out where there are several processes."""
        world = ambient.start().world
        is_snapshot = self.use_stateful_dataloader and world.size == 1
        source_class = SnapshotSource if is_snapshot else TorchSource
        inner = source_class(self, None, self.followers(), reads=world.rank == 0)
        if world.size == 1:
            return inner
        num_processes = self.num_processes
        joins = self.slice_fn is not slice_tensors
        reader = Dealt(
            num_processes,
            self.split_batches,
            self.even_batches,
            self._drop_last,
            self._cut,
            joins,
        )
        return DispatchSource(inner, reader, world, _data_ranks(self.num_processes))

    def move(self) -> Move | None:
        """Return the copier of batches to the device; those that are dealt out have been read ahead already."""
        if ambient.start().world.size > 1:
            if self.device is None:
                return None
            return move_on_request(self.put)
        ahead = OneAhead(self.device, self.put)
        if self.slice_fn is slice_tensors:
            return ahead
        cut = move_on_request(
            lambda batch: self._cut(batch, slice(0, find_batch_size(batch)))
        )
        return lambda items: ahead(cut(items))

    def _cut(self, batch: Any, rows: slice, shard: int = 0, num_shards: int = 1) -> Any:
        return self.slice_fn(batch, rows, process_index=shard, num_processes=num_shards)

    def given(self, batch: Any) -> Any:
        """Return the batch; the last tells how many samples all processes have of it."""
        if self.end_of_dataloader:
            source_state = self.loader_iteration.source_state
            total = source_state if isinstance(source_state, int) else None
            self.remainder = total or find_batch_size(batch) or -1
        else:
            self.remainder = -1
        return batch


class SkipDataLoader(DataLoaderStateMixin, SkippingLoader, DataLoaderAdapter):
    def __init__(
        self,
        dataset: Any,
        skip_batches: int = 0,
        use_stateful_dataloader: bool = False,
        **kwargs: Any,
    ) -> None:
        DataLoaderAdapter.__init__(self, dataset, use_stateful_dataloader, **kwargs)
        self.skip_batches = skip_batches

    latest: Any = None

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]  # torch promises its private iterator class
        self.begin()
        try:
            for batch in super().__iter__():
                if self.use_stateful_dataloader:
                    self.latest = copy.deepcopy(torchdata_kind(self).state_dict(self))
                yield batch
        finally:
            self.end()

    def state_dict(self) -> Any:
        """torchdata's state at the latest batch. Raises: AttributeError for a plain loader, which has none."""
        if self.latest is None:
            return torchdata_kind(self).state_dict(self)
        return self.latest

    def load_state_dict(self, state_dict: Any) -> None:
        self.latest = None
        torchdata_kind(self).load_state_dict(self, state_dict)
