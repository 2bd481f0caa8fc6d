"""What prepared loaders share: position, epoch, end, and the clock that watches them."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import islice
from typing import Any

import torch
from torch.utils.data import DataLoader

from accelerate._impl import ambient
from accelerate._impl.ambient import AMBIENT
from accelerate._impl.copying import Copyable
from accelerate._impl.loaders.samplers import BatchSamplerShard, IterableDatasetShard, SkipBatchSampler, sampler_of
from accelerate._impl.surface.homes import settle
from hasten.optim.clock import LoaderCursor, StepClock

# Any in this file: batches, datasets and samplers are the user's own.


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
        ambient.forget_loader(self)


class DataLoaderAdapter(DataLoader[Any]):
    """A DataLoader with the constructor prepared loaders share."""

    def __init__(
        self, dataset: Any, use_stateful_dataloader: bool = False, batch_sampler: Any = None, **kwargs: Any
    ) -> None:
        self.use_stateful_dataloader = use_stateful_dataloader
        if batch_sampler is not None:
            formed = ("batch_size", "shuffle", "sampler", "drop_last")
            kwargs = {key: value for key, value in kwargs.items() if key not in formed} | {
                "batch_sampler": batch_sampler
            }
        with warnings.catch_warnings():  # torchdata 0.11 makes a call that torch has deprecated
            warnings.filterwarnings("ignore", message="'set_vital' is deprecated")
            super().__init__(dataset, **kwargs)

    @property
    def base_dataloader(self) -> DataLoader[Any]:
        """The loader below: itself."""
        return self


class PreparedLoader(Copyable, DataLoaderStateMixin, DataLoaderAdapter):
    """What both prepared loaders share: position, epoch, end, and the clock that watches them."""

    belongs_to_run = ("clock", "_iterator")

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
        super().__init__(dataset, use_stateful_dataloader, **kwargs)
        self.device, self.rng_types, self.synchronized_generator = device, rng_types, synchronized_generator
        self.skip_batches, self._drop_last, self._non_blocking = skip_batches, _drop_last, _non_blocking
        self.cursor, self.progress = LoaderCursor(), Progress(iteration)
        self.clock: StepClock | None = None
        self.num_processes, self.process_index = 1, 0
        self.split_batches, self.even_batches = False, True

    def rejoin(self) -> None:
        """Be watched by the clock that the loader copied is watched by, or by the latest Accelerator's."""
        vars(self).setdefault("clock", None)
        vars(self)["_iterator"] = None

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
        cursor.epoch, cursor.batch, cursor.at_end = progress.iteration, 0, False
        cursor.num_real = cursor.num_rows = None
        progress.batch = self._first
        self.begin()
        try:
            with (self.clock or ambient.clock()).watching(cursor):
                yield
        finally:
            self.end()
            progress.iteration += 1
            progress.batch = progress.resume_at = 0

    @property
    def _first(self) -> int:
        """The number of batches that are read past."""
        return max(self.skip_batches, self.progress.resume_at)

    def _skipped(self, batches: Iterable[Any]) -> Iterator[Any]:
        return islice(batches, self._first, None)

    def _hand(self, batch: Any, last: bool) -> Any:
        """Move the cursor to this batch."""
        cursor, progress = self.cursor, self.progress
        cursor.batch += 1
        progress.batch += 1
        cursor.at_end = self.end_of_dataloader = last
        return batch

    def state_dict(self) -> dict[str, Any]:
        """Where the loop stands."""
        progress = self.progress
        generator = self.synchronized_generator
        between = None if generator is None else generator.get_state()
        order = progress.order if progress.batch else between
        return {
            "iteration": progress.iteration,
            "batch": progress.batch,
            "order": order,
            "_num_yielded": progress.batch,
            "_iterator_finished": progress.batch == 0,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go back to the epoch a state was taken in and its order and, with use_stateful_dataloader, to the batch."""
        progress = self.progress
        progress.iteration = int(state_dict["iteration"])
        progress.next_order = state_dict.get("order")
        if self.use_stateful_dataloader:  # quirk: POSITION_IS_OPT_IN
            progress.resume_at = int(state_dict["batch"])

    def skipping(self, num_batches: int) -> Any:
        """The same loader without its first batches; it shares this loader's position."""
        changed: dict[str, Any] = {"_iterator": None, "cursor": LoaderCursor()}
        if self.batch_sampler is not None and self._picks_by_index():
            changed["batch_sampler"] = SkipBatchSampler(self.batch_sampler, num_batches)
        else:
            changed["skip_batches"] = self.skip_batches + num_batches
        loader = copy.copy(self)
        loader.__dict__.update(changed)
        return loader

    def _picks_by_index(self) -> bool:
        """Whether batches that are skipped need not be read."""
        return False

    def even(self, even_batches: bool) -> AbstractContextManager[None]:
        """A block in which batches are shared with this `even_batches`, where this process itself takes its share."""
        return nullcontext()

    def __len__(self) -> int:
        return max(super().__len__() - self.skip_batches, 0)


settle(__name__, "accelerate.data_loader")
