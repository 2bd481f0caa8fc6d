"""The prepared loader: a DataLoader that reports its batches, epoch, end and position to the rest of hasten."""

from __future__ import annotations

import copy
import weakref
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from functools import partial
from numbers import Integral
from operator import is_
from typing import Any, Final

import msgspec
import torch
from torch.utils.data import DataLoader, IterableDataset

from hasten.data.batch_plan import derive_seed
from hasten.data.position import Count, Position, Unit
from hasten.data.source import BatchSource, Item, count_last_samples
from hasten.errors import ArgumentError, DataError, LoaderStateError, PrepareError
from hasten.optim.clock import LoaderCursor, StepClock

Move = Callable[[Iterator[Item]], Iterator[Item]]
MakeMove = Callable[[int, Collection[str]], Move]
"""Makes a move that works so many batches ahead and does not move values under these keys."""

_FIXED: Final = frozenset({"num_workers", "persistent_workers", "in_order"})
_FORWARDED: Final = frozenset(
    {
        "collate_fn",
        "generator",
        "multiprocessing_context",
        "pin_memory",
        "pin_memory_device",
        "prefetch_factor",
        "timeout",
        "worker_init_fn",
    }
)


@dataclass(slots=True)
class LoaderIteration:
    """The pass over a loader that runs or comes next, shared by the loader's skipping copies.

    The loop's position is `start` and the number of batches since; a `Position` is computed from them only when it is
    saved, because that takes longer than to count a batch.
    """

    start: Position
    steps: int = 0
    """Number of batches returned to the user since `start`."""
    source_state: Any = None  # Any: each source has another
    """State of the source after the latest of these batches."""
    fresh: bool = True
    """True if the next iteration starts at `start`; False once an iteration has started there."""
    iterator: weakref.ref[Iterator[Any]] | None = None
    """The newest iterator of the loader, if it has not been read yet."""
    requested_at: int = 0
    """Time at which that iterator was made, in moves of all loaders."""

    def upcoming(self) -> Position:
        """Return the start of the next iteration. An abandoned iteration is over: the next one takes the next epoch."""
        if self.fresh:
            return self.start
        return self.start.begin(self.start.epoch + 1)

    def enter(self, position: Position) -> None:
        """Record that an iteration starts at `position`."""
        self.start = position
        self.steps = 0
        self.source_state = None
        self.fresh = False
        self.iterator = None

    def place(self, position: Position) -> None:
        """Make the next iteration start at `position`."""
        self.enter(position)
        self.fresh = True

    def set_epoch(self, epoch: int) -> None:
        """Make the next iteration start at `epoch`; a position inside that same epoch is preserved."""
        number: object = epoch
        if not isinstance(number, Integral) or epoch < 0:
            raise ArgumentError(
                f"set_epoch({epoch!r}) is not an epoch, so its order is unknown; give a whole number from 0."
            )
        if not (self.fresh and self.start.epoch == epoch):
            self.place(self.start.begin(epoch))


@dataclass(frozen=True, slots=True)
class LoaderParts:
    """Components of a prepared loader."""

    source: BatchSource
    clock: StepClock
    iteration: LoaderIteration
    move: Move | None
    """Moves batches to the device; None when they are not moved."""
    shard: int
    total_batch_size: int | None
    cursor: LoaderCursor = field(default_factory=LoaderCursor)
    skip: int = 0
    equalise: Callable[[], None] | None = None
    """Synchronizes random generators over all ranks at the start of an epoch."""


class Loader(DataLoader[Any]):
    """A prepared DataLoader with all settings of the user's; `len` counts this rank's batches.

    Each pass takes the next epoch automatically. `state_dict()` is the position of the loop: the batch in use
    counts as consumed.
    """

    parts: LoaderParts

    def __init__(self, *_: Any, **__: Any) -> None:
        raise TypeError(
            "a Loader is created by prepare(), not directly: call accelerator.prepare(DataLoader(...))"
        )

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _FIXED and "parts" in self.__dict__:
            raise PrepareError(
                f"{name} of a prepared loader cannot be changed, because its workers are already configured. Set it on "
                f"the DataLoader before prepare()."
            )
        super().__setattr__(name, value)
        if name in _FORWARDED and "parts" in self.__dict__:
            self.parts.source.change(name, value)

    @property
    def cursor(self) -> LoaderCursor:
        """Cursor of this loader in the epoch."""
        return self.parts.cursor

    @property
    def epoch(self) -> int:
        """The current epoch, or the one that starts next."""
        return self.parts.iteration.start.epoch

    @property
    def total_batch_size(self) -> int | None:
        """Number of samples that all processes together take in one full step; None when batches vary."""
        return self.parts.total_batch_size

    @property
    def total_dataset_length(self) -> int:
        """Number of samples in the dataset."""
        return len(self.dataset)  # type: ignore[arg-type] # torch types datasets without __len__

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override] # torch promises its private iterator class
        iteration = self.parts.iteration
        loaders = self.parts.clock.loaders
        self._end_unread_pass()
        if not self.parts.cursor.num_again:
            loaders.record_start(self.parts.cursor)
        # takes its epoch with the first batch: progress bars make iterators without use
        iterator = self._yield_batches()
        iteration.iterator = weakref.ref(iterator)
        iteration.requested_at = loaders.num_moves
        return iterator

    def _end_unread_pass(self) -> None:
        """End a loaded pass that was requested, and not continued before another loader ran out: the loop over both is over."""
        iteration = self.parts.iteration
        was_unread = (
            iteration.iterator is not None
            and iteration.requested_at <= self.parts.clock.loaders.exhausted_at
        )
        if was_unread and iteration.fresh and iteration.start.consumed:
            iteration.place(iteration.start.begin(iteration.start.epoch + 1))

    def _begin_pass(self) -> tuple[Iterator[Item], Position]:
        """Start an iteration at the loader's position; a skipping copy starts `skip` batches into that epoch."""
        components = self.parts
        if not components.iteration.fresh:
            components.iteration.place(components.iteration.upcoming())
        components.clock.keep_position(components.cursor)
        position = components.iteration.start
        if components.skip:
            skipped_position = components.source.skipped(
                replace(position, consumed=0), components.skip
            )
            position = replace(skipped_position, batches=components.skip)
        # a resumed epoch has saved states
        if components.equalise is not None and position.consumed == 0:
            components.equalise()
        source = components.source
        if source.engine is not self:
            seed = derive_seed(position.seed, position.epoch, components.shard, 1)
            source.engine.generator = torch.Generator().manual_seed(seed)
        set_epoch = getattr(self.dataset, "set_epoch", None)
        if callable(set_epoch):
            set_epoch(position.epoch)
        position = source.begin(position)
        components.iteration.enter(position)
        items = source.open(position)
        cursor = components.cursor
        cursor.epoch = position.epoch
        cursor.batch = 0
        cursor.at_end = False
        cursor.num_real = cursor.num_rows = cursor.pads_like = None
        num_units = source.size()
        if num_units is not None and components.total_batch_size is not None:
            cursor.pads_like = (
                num_units,
                position.consumed,
                components.total_batch_size,
            )
        if not cursor.opened:
            components.clock.loaders.record_start(cursor)
        return items if components.move is None else components.move(items), position

    def _yield_batches(self) -> Iterator[Any]:
        """Yield the batches from the loader's position to the end of its epoch."""
        components = self.parts
        cursor = components.cursor
        iteration = components.iteration
        clock = components.clock
        if cursor.num_again:  # the resumed epoch had completed this pass
            cursor.num_again -= 1
            cursor.num_ended += 1
            return
        active_loaders = clock.loaders
        run_parts = clock.parts
        global_batch_size = components.total_batch_size
        for call_part in run_parts.pass_begins:
            call_part(cursor)
        items, pass_start = self._begin_pass()
        with clock.iterate_loader(cursor):
            for batch, padding, is_last, source_state in items:
                if iteration.start is pass_start:  # not superseded by a later pass
                    iteration.steps += 1
                    iteration.source_state = source_state
                active_loaders.record_batch(cursor)
                cursor.batch += 1
                cursor.num_real, cursor.num_rows = (
                    (None, None) if padding is None else padding
                )
                cursor.at_end = is_last
                cursor.current_batch = batch
                cursor.num_samples = global_batch_size
                if is_last:
                    source = self.parts.source
                    num_steps = iteration.steps
                    cursor.num_samples = count_last_samples(
                        source,
                        pass_start,
                        num_steps,
                        cursor,
                        global_batch_size,
                        self.batch_size,
                    )
                cursor.passes_at_batch = clock.num_passes
                for call_part in run_parts.batch_ready:
                    call_part(cursor)
                yield batch
                for call_part in run_parts.batch:
                    call_part(cursor)
                if clock.every > 1:
                    clock.keep_position(cursor)
            if iteration.start is pass_start:
                iteration.place(pass_start.begin(pass_start.epoch + 1))

    def current(self) -> tuple[Position, int]:
        """Return the start of the pass, and the number of batches since then: the latest is the one in use."""
        iteration = self.parts.iteration
        return iteration.start, iteration.steps

    def samples(
        self, start: Position | None = None, steps: int = 0
    ) -> list[int] | None:
        """Return the dataset indices of a batch of this rank: of the one in use, or of batch number `steps` since `start`.

        None when they cannot be computed: for a stream, or a custom sampler. Padding is excluded.
        """
        if start is None:
            start, steps = self.current()
        assignment = getattr(self.parts.source, "assignment", None)
        if assignment is None or steps == 0:
            return None
        sample_indices: list[int] | None = assignment.batch_of(start, steps - 1)
        return sample_indices

    def __len__(self) -> int:
        num_steps = self.parts.source.steps()
        if num_steps is None:
            reason = "its sampler has none"
            if isinstance(self.dataset, IterableDataset):
                reason = "its dataset is a stream"
            raise TypeError(
                f"this loader has no length: {reason}. Count batches while iterating, or implement __len__."
            )
        return max(num_steps - self.parts.skip, 0)

    def is_running(self) -> bool:
        """Return True if a pass over this loader runs."""
        return any(
            map(partial(is_, self.parts.cursor), self.parts.clock.loaders.watched)
        )

    def is_midway(self) -> bool:
        """Return True if a resume starts inside an epoch: a pass runs, was left by `break`, or was resumed but not run."""
        iteration = self.parts.iteration
        if iteration.fresh:
            return iteration.start.consumed > 0
        return self.parts.cursor.left or self.is_running()

    def end_pass(self, resumed: bool = False) -> None:
        """Reset the count of an epoch's passes and end a pass left by `break`: the next pass starts the next epoch.

        With `resumed`, a pass that was loaded and has not been continued is ended too.
        """
        iteration = self.parts.iteration
        cursor = self.parts.cursor
        cursor.num_ended = cursor.num_again = 0
        if not iteration.fresh and not self.is_running():
            iteration.place(iteration.upcoming())
        elif resumed and iteration.fresh and iteration.start.consumed:
            iteration.place(iteration.start.begin(iteration.start.epoch + 1))

    @property
    def num_done(self) -> int:
        """Number of batches of the epoch before the first batch of the next pass on this rank."""
        source = self.parts.source
        iteration = self.parts.iteration
        if self.parts.cursor.num_again:
            return len(self)
        skips_batches = self.parts.skip > 0  # counts from the epoch's first batch
        if not iteration.fresh or not iteration.start.consumed or skips_batches:
            return 0
        position = iteration.start
        num_steps = source.steps()
        num_units = source.size()
        if source.unit == "stream" or num_steps is None or num_units is None:
            return position.batches
        epoch_start = replace(position, consumed=0)
        step_numbers = range(num_steps + 1)
        num_done = (
            bisect_right(
                step_numbers,
                position.consumed,
                key=lambda number: source.skipped(epoch_start, number).consumed,
            )
            - 1
        )
        num_left = bisect_left(
            step_numbers,
            num_units,
            key=lambda number: source.skipped(position, number).consumed,
        )
        # with another world size, steps need not start where the saved ones ended
        return max(num_done, num_steps - num_left)

    def set_epoch(self, epoch: int) -> None:
        """Start at `epoch` when iterated next; without a call, every pass takes the next epoch."""
        self.parts.iteration.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the loop on this rank as JSON values, sufficient for an exact resume."""
        return self.saved_state()

    def saved_state(self, has_trained: bool = False) -> dict[str, Any]:
        """Return the state that checkpoints contain; `load_state_dict` takes it too.

        In a run that `has_trained`, a pass without backward passes is an evaluation, which a resumed run begins anew.
        """
        iteration = self.parts.iteration
        cursor = self.parts.cursor
        source = self.parts.source
        is_evaluation = False
        if has_trained and not iteration.fresh and not cursor.left:
            if not self.is_running():
                iteration.place(iteration.upcoming())
            elif self.parts.clock.num_passes == cursor.passes_before:
                is_evaluation = True
        # the loop that read it is over, so its pass is too
        if cursor.cut and not iteration.fresh and not is_evaluation:
            iteration.place(iteration.upcoming())
        if iteration.iterator is not None and iteration.iterator() is None:
            self._end_unread_pass()
        num_batches = 0 if is_evaluation else iteration.steps
        position = iteration.start
        if num_batches:
            position = source.reached(position, num_batches, iteration.source_state)
        elif iteration.fresh or not iteration.steps:
            position = source.remember(position)
        position = replace(position, batches=iteration.start.batches + num_batches)
        return encode_position(position, source.unit, source.size())

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Make the next iteration continue from `state`, also with another world size.

        Raises: DataError when the state belongs to other data.
        """
        self.parts.iteration.place(self.checked(state))

    def checked(self, state: Mapping[str, Any]) -> Position:
        """Return the position in a state. Raises: DataError when it belongs to other data."""
        return decode_position(state, self.parts.source.unit, self.parts.source.size())

    @contextmanager
    def even(self, even_batches: bool) -> Iterator[None]:
        """Context manager in which epochs start with this `even_batches` instead of the configured one."""
        components = self.parts
        self.parts = replace(components, source=components.source.copied(even_batches))
        try:
            yield
        finally:
            self.parts = components

    def skipping(self, num_batches: int) -> Loader:
        """Return the same loader, starting every epoch `num_batches` later; it shares this loader's position."""
        components = replace(
            self.parts,
            source=self.parts.source.copied(),
            skip=self.parts.skip + num_batches,
        )
        loader = copy.copy(self)
        loader.__dict__.update(_iterator=None, parts=components)
        return loader


# -- positions as JSON values -------------------------------------------------------------------------------------
_VERSION: Final = 1


class _StreamRecord(msgspec.Struct):
    """Fields of a saved stream's state, as far as they are checked; each list has one value per worker."""

    workers: Count
    positions: list[Count]
    turn: Count
    states: list[Any] | None = None
    rngs: list[Any] | None = None
    origins: list[Any] | None = None


class _LoaderRecord(msgspec.Struct):
    """Required fields of a saved loader's state besides those of its position."""

    unit: Unit
    size: Count | None
    epoch: Count
    consumed: Count
    seed: int


def encode_position(position: Position, unit: Unit, size: int | None) -> dict[str, Any]:
    """Return the position as JSON values, with the facts needed to refuse a loader it does not belong to."""
    state: dict[str, Any] = {"version": _VERSION, "unit": unit, "size": size}
    for position_field in fields(position):
        field_value = getattr(position, position_field.name)
        if (
            position_field.name in ("epoch", "consumed", "seed")
            or field_value != position_field.default
        ):
            state[position_field.name] = (
                list(field_value) if isinstance(field_value, tuple) else field_value
            )
    # of other loaders, another world size has another number
    if unit != "stream" or not position.consumed:
        state.pop("batches", None)
    return state


def decode_position(state: Mapping[str, Any], unit: Unit, size: int | None) -> Position:
    """Return the position that `encode_position` returned.

    Raises: LoaderStateError for an invalid state; DataError when it was written by a loader with another order.
    """
    if not isinstance(state, Mapping):
        raise LoaderStateError(
            f"the loader's state is a {type(state).__name__} where a mapping is expected, so there is no position to continue from. "
            "Pass the state_dict() of a prepared loader."
        )
    if state.get("version") != _VERSION:
        raise LoaderStateError(
            f"the loader's state has version {state.get('version')}, and this hasten reads version {_VERSION}; continuing could repeat or "
            "lose samples. Resume with the version of hasten that wrote it, or start a new epoch."
        )
    try:
        msgspec.convert(state, _LoaderRecord)
        position = msgspec.convert(state, Position)
        if position.stream is not None:
            _check_stream(position.stream)
    except msgspec.ValidationError as error:
        raise LoaderStateError(
            f"the loader's state is invalid ({error}), so it is damaged, was edited, or was not written by hasten. Nothing was loaded. "
            "Pass an unchanged state_dict() of a prepared loader, or start a new epoch."
        ) from error
    if state["consumed"] and state["unit"] != unit:
        raise DataError(
            f"the loader's state counts {state['unit']}, and this loader counts {unit}: its dataset or batch sampler is of a different "
            "kind, so the position is invalid. Prepare the loader of the saved run."
        )
    # shards are compared when they are read
    compares_sizes = "part" not in state and (size is not None or unit == "stream")
    if state["consumed"] and compares_sizes and state["size"] != size:
        raise DataError(
            f"the loader's state is {state['consumed']} {unit} into an epoch of {state['size']}, and this loader's "
            f"epoch has {size}; its order is different, so samples would be repeated or lost. Restore the dataset, "
            f"or start a new epoch with loader.set_epoch({state['epoch'] + 1}) and no loaded state."
        )
    return position


def _check_stream(state: Mapping[str, Any]) -> None:
    """Raise msgspec.ValidationError unless a stream's state has one value per worker."""
    record = msgspec.convert(state, _StreamRecord)
    for values in (record.positions, record.states, record.rngs, record.origins):
        if values is not None and len(values) != record.workers:
            raise msgspec.ValidationError(
                f"{len(values)} values for {record.workers} workers - at `$.stream`"
            )
