"""What prepared loaders share: hasten's own loader with the original's face."""

import copy
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.data import DataLoader

from accelerate._impl import ambient
from accelerate._impl.ambient import AMBIENT
from accelerate._impl.copying import Copyable
from accelerate._impl.loaders.samplers import BatchSamplerShard, IterableDatasetShard, get_sampler
from accelerate._impl.loaders.sequence_parts import SequenceShardSource, SequenceSplitter
from accelerate._impl.loaders.torch_source import OneAhead, TorchSource
from accelerate._impl.surface.shown import shown
from accelerate._impl.views.random import synchronize_rng_states
from hasten.data.loader import Loader, LoaderParts, Move, Track, forward_epoch
from hasten.data.position import Position
from hasten.data.source import BatchSource
from hasten.optim.clock import LoaderCursor, StepClock

# Any in this file: batches, datasets and samplers are the user's own.


class DataLoaderStateMixin:
    """What GradientState reads of a loader that is being iterated."""

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
        ambient.forget_loader(self)


class DataLoaderAdapter(DataLoader[Any]):
    """A DataLoader with the constructor prepared loaders share."""

    def __init__(
        self, dataset: Any, use_stateful_dataloader: bool = False, batch_sampler: Any = None, **kwargs: Any
    ) -> None:
        self.use_stateful_dataloader = use_stateful_dataloader
        if batch_sampler is not None:
            for formed in ("batch_size", "shuffle", "sampler", "drop_last"):
                kwargs.pop(formed, None)
            kwargs["batch_sampler"] = batch_sampler
        with warnings.catch_warnings():  # torchdata 0.11 makes a call that torch has deprecated
            warnings.filterwarnings("ignore", message="'set_vital' is deprecated")
            super().__init__(dataset, **kwargs)

    base_dataloader = shown(lambda self: self, "The loader below: itself.")


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
        self.device, self.rng_types, self.synchronized_generator = device, rng_types, synchronized_generator
        self.skip_batches, self._drop_last, self._non_blocking = skip_batches, _drop_last, _non_blocking
        self.track, self.place_in_epoch = Track(Position(epoch=iteration)), LoaderCursor(nests=True)
        self.clock: StepClock | None = None
        self.cut: SequenceSplitter | None = None  # how sequences are cut, where processes share them
        self.num_processes, self.process_index = 1, 0
        self.split_batches, self.even_batches = False, True

    @property
    def parts(self) -> LoaderParts:  # type: ignore[override]  # put together of attributes, which clients change
        """What hasten's loader is put together from."""
        return LoaderParts(
            source=self.source() if self.cut is None else SequenceShardSource(self.source(), self.cut),
            clock=self.clock or ambient.clock(),
            track=self.track,
            move=self.move(),
            shard=self.process_index,
            total_batch_size=self.total_batch_size,
            cursor=self.place_in_epoch,
            skip=self.skip_batches,
        )

    def followers(self) -> tuple[Any, ...]:
        """The samplers that are told which epoch begins."""
        return tuple(one for one in (get_sampler(self), self.batch_sampler) if not isinstance(one, BatchSamplerShard))

    def source(self) -> BatchSource:
        """Where batches come from."""
        return TorchSource(self, self.synchronized_generator, self.followers())

    def move(self) -> Move | None:
        """What brings batches to the device."""
        return OneAhead(self.device, self._non_blocking)

    def rejoin(self) -> None:
        """Be watched by the clock that the loader copied is watched by, or by the latest Accelerator's."""
        vars(self).setdefault("clock", None)
        vars(self).setdefault("cut", None)
        vars(self)["_iterator"] = None

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]  # torch promises its private iterator class
        if self.rng_types is not None:
            synchronize_rng_states(self.rng_types, self.synchronized_generator)
        batches: Any = iter(())
        self.begin()
        try:
            batches = super().__iter__()
            for batch in batches:
                self.end_of_dataloader = self.place_in_epoch.at_end
                yield self.given(batch)
        finally:  # however the loop is left
            batches.close()
            self.end()
            if not self.track.fresh:
                self.track.place(self.track.upcoming())

    def given(self, batch: Any) -> Any:
        """The batch that the loop gets."""
        return batch

    iteration = shown(
        "epoch", "The epoch that begins next, or is being read.", lambda self, epoch: self.track.set_epoch(epoch)
    )

    def set_epoch(self, epoch: int) -> None:
        """Begin at `epoch` when iterated next."""
        super().set_epoch(epoch)
        for target in (*self.followers(), self.dataset):
            forward_epoch(target, epoch)

    @property
    def total_dataset_length(self) -> int | None:  # type: ignore[override]  # streams may have none
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
        together = 1 if self.cut is None else self.cut.comm.size  # processes that share a batch
        return int(size if self.split_batches else size * self.num_processes // together)

    def state_dict(self) -> dict[str, Any]:
        """Where the loop stands."""
        yielded = self.track.begun + self.track.steps
        shown = {"_num_yielded": yielded, "_iterator_finished": yielded == 0}
        return {**super().state_dict(), "batches": yielded, **shown}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go back to the epoch a state was taken in and its order and, with use_stateful_dataloader, to the batch."""
        # quirk: POSITION_IS_OPT_IN
        beginning = {} if self.use_stateful_dataloader else {"consumed": 0, "batches": 0}
        super().load_state_dict({**state_dict, **beginning})

    def skipping(self, num_batches: int) -> Any:
        """The same loader without its first batches; it shares this loader's position."""
        loader = copy.copy(self)
        loader.__dict__.update(clock=self.clock, cut=self.cut, skip_batches=self.skip_batches + num_batches)
        return loader

    @contextmanager
    def even(self, even_batches: bool) -> Iterator[None]:
        """A block in which batches are shared with this `even_batches`, where this process itself takes its share."""
        yield
