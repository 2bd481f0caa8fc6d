"""The prepared loader: a DataLoader whose batches, epoch, end and position are known to the rest of hasten."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any, Final, NamedTuple

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler

from hasten.data import epoch_position as standing
from hasten.data.plan import derive_seed
from hasten.data.position import Position, decode, encode
from hasten.data.source import Item, Source, engine_of
from hasten.errors import ConfigError, PrepareError
from hasten.optim.clock import LoaderCursor, StepClock

Move = Callable[[Iterator[Item]], Iterator[Item]]
MakeMove = Callable[[int, Collection[str]], Move]
"""Makes a move that works so many batches ahead and leaves values under these keys where they are."""

Extent = tuple[int, int, int]
"""A global batch: its epoch, and where it begins and ends there, in units of the order (of a stream: in batches)."""

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
class Track:
    """The one place that knows where a loader stands; loaders made by skipping share it."""

    start: Position
    steps: int = 0
    """Batches handed to the user since `start`."""
    mark: Any = None
    fresh: bool = True
    """`start` is where the next iteration begins; false once an iteration has begun there."""
    begun: int = 0
    """Batches of the epoch before `start`."""
    left_out: set[Extent] = field(default_factory=set)
    """Batches that are read and not given."""
    lasting: bool | None = None
    """Whether persistent workers ran where a loaded position was taken; None unless the next iteration begins at one."""

    def upcoming(self) -> Position:
        """Return where the next iteration begins. One that was abandoned is over: the next takes the next epoch."""
        return self.start if self.fresh else self.start.begin(self.start.epoch + 1)

    def enter(self, at: Position, begun: int = 0) -> None:
        self.start, self.steps, self.mark, self.fresh, self.begun = at, 0, None, False, begun
        self.lasting = None

    def place(self, at: Position, begun: int = 0) -> None:
        """Make the next iteration begin at `at`."""
        self.enter(at, begun)
        self.fresh = True

    def set_epoch(self, epoch: int) -> None:
        """Begin at `epoch` next; a position inside that very epoch is kept."""
        if not (self.fresh and self.start.epoch == epoch):
            self.place(self.start.begin(epoch))


class Place(NamedTuple):
    """A batch of one pass: where the pass began, and how many batches it had given, this one included."""

    start: Position
    steps: int
    begun: int = 0
    """Batches of the epoch before the pass."""


@dataclass(frozen=True, slots=True)
class Parts:
    """What a prepared loader is put together from."""

    source: Source
    clock: StepClock
    track: Track
    move: Move | None
    """Puts batches on the device, or None when they stay where they are."""
    shard: int
    total_batch_size: int | None
    cursor: LoaderCursor = field(default_factory=LoaderCursor)
    skip: int = 0
    equalise: Callable[[], None] | None = None
    """Makes random generators equal on all ranks, at the beginning of an epoch."""
    draws_as_torch: bool = False
    """Whether the process's own generator is drawn from as a plain DataLoader draws from it."""


class Loader(DataLoader[Any]):
    """A prepared DataLoader. Keeps every setting of the user's; `len` counts this rank's batches.

    Each pass takes the next epoch by itself. `state_dict()` is where the loop stands: the batch in the user's hands
    counts as consumed.
    """

    parts: Parts

    def __init__(self, *_: Any, **__: Any) -> None:
        raise TypeError("a Loader is made by prepare(), not by hand: call accelerator.prepare(DataLoader(...))")

    @classmethod
    def made(cls, user: DataLoader[Any], parts: Parts, **shown: Any) -> Loader:
        """Return a loader with the user's attributes, but for those in `shown`."""
        loader = cls.__new__(cls)
        loader.__dict__.update(user.__dict__)
        loader.__dict__.update(_iterator=None, parts=parts, **shown)
        return loader

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _FIXED and "parts" in self.__dict__:
            raise PrepareError(
                f"{name} of a prepared loader cannot be changed, because its workers are arranged already. Set it on "
                f"the DataLoader before prepare()."
            )
        super().__setattr__(name, value)
        if name in _FORWARDED and "parts" in self.__dict__:
            self.parts.source.change(name, value)

    @property
    def cursor(self) -> LoaderCursor:
        """Where this loader stands in the epoch."""
        return self.parts.cursor

    @property
    def epoch(self) -> int:
        """The epoch the loader is in, or begins next."""
        return self.parts.track.start.epoch

    @property
    def total_batch_size(self) -> int | None:
        """Samples that all processes together take in one full step; None when batches vary."""
        return self.parts.total_batch_size

    @property
    def total_dataset_length(self) -> int:
        """The samples in the dataset."""
        return len(self.dataset)  # type: ignore[arg-type] # torch types datasets without __len__

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override] # torch promises its private iterator class
        cursor = self.parts.cursor
        if cursor.num_again:  # the resumed epoch had read this pass to its end
            cursor.num_again, cursor.num_ended = cursor.num_again - 1, cursor.num_ended + 1
            return iter(())
        return self._hand_out(*self._begin(self.parts.skip))

    def _begin(self, skip: int) -> tuple[Iterator[Item], Position]:
        """Begin an iteration where the loader stands, or so many batches into that epoch."""
        parts = self.parts
        at, begun = parts.track.upcoming(), parts.track.begun if parts.track.fresh else 0
        if skip:
            at, begun = parts.source.skipped(replace(at, consumed=0), skip), skip
        if parts.equalise is not None and at.consumed == 0:  # a resumed epoch has its own states
            parts.equalise()
        self._set_seeds(at)
        at = parts.source.begin(at)
        parts.track.enter(at, begun)
        items = parts.source.open(at)
        cursor = parts.cursor
        cursor.epoch, cursor.batch, cursor.at_end, cursor.num_real, cursor.num_rows = at.epoch, 0, False, None, None
        alike = (parts.source.size(), at.consumed, parts.total_batch_size, parts.source.steps())
        cursor.pads_like = None if None in alike else alike
        parts.clock.cursors.opening(cursor)
        return items if parts.move is None else parts.move(items), at

    def _hand_out(self, items: Iterator[Item], here: Position) -> Iterator[Any]:
        """The batches to the end of the epoch. A run that has gone back gets those from its new position to the end of this epoch."""
        cursors, until = self.parts.clock.cursors, here.epoch
        with self.parts.clock.watching(self.parts.cursor):
            while True:
                times = cursors.times_back
                yield from self._pass(items, here, times)
                if cursors.times_back == times and here.epoch >= until:
                    return
                if callable(close := getattr(items, "close", None)):
                    close()
                items, here = self._begin(0 if self.parts.track.upcoming().consumed else self.parts.skip)

    def _pass(self, items: Iterator[Item], here: Position, times: int) -> Iterator[Any]:
        """Yield the batches of these items; ends early when the run has gone back."""
        cursor, track, clock = self.parts.cursor, self.parts.track, self.parts.clock
        cursors, marks, size = clock.cursors, clock.marks, self.parts.total_batch_size or 0
        if marks is not None:
            marks.asked()
        for batch, padding, last, mark in items:
            if track.start is here:  # not overtaken by a later pass
                track.steps += 1
                track.mark = mark
                if track.left_out and self._is_left_out():
                    continue
            cursors.moving(cursor)
            cursor.batch += 1
            cursor.num_real, cursor.num_rows = (None, None) if padding is None else padding
            cursor.at_end, cursor.given = last, batch
            if marks is not None:
                marks.got(size)
            yield batch
            if cursors.go_back is not None:
                cursors.go_back(cursor)
            if cursors.times_back != times:
                return
            if cursors.before_next is not None:
                cursors.before_next(cursor)
            if marks is not None:
                marks.asked()
        if track.start is here:
            track.place(here.begin(here.epoch + 1))

    def _set_seeds(self, at: Position) -> None:
        parts = self.parts
        engine = parts.source.engine
        if at.generator is None or (self.generator is None and not at.consumed):  # else it is the state after this draw
            self._draw_workers_seed()
        if engine is not self:
            engine.generator = torch.Generator().manual_seed(derive_seed(at.seed, at.epoch, parts.shard, 1))
        forward_epoch(self.dataset, at.epoch)

    def _draw_workers_seed(self) -> None:
        """Draw from the user's generator what a DataLoader draws before the order: a seed, whenever it begins to read.

        The seed itself is not used. Persistent workers are started once, so a resumed run, which starts them again, must
        not draw again: the saved position holds the generator's state after this draw, or that workers ran already.
        """
        generator = self.generator
        if self.parts.source.engine is self:  # torch draws it
            return
        draws = self.parts.draws_as_torch or isinstance(generator, torch.Generator)
        if draws and not self._has_workers():
            torch.empty((), dtype=torch.int64).random_(generator=generator)

    def _has_workers(self) -> bool:
        """Return whether persistent workers run, or did so where the loaded position was taken."""
        lasting = self.parts.track.lasting
        return self.parts.source.engine.__dict__["_iterator"] is not None if lasting is None else lasting

    def _remembered(self, at: Position) -> Position:
        """`at`, where no batch was taken yet, with what the next iteration would begin from."""
        generator = self.generator
        if at.generator is not None or not isinstance(generator, torch.Generator):
            return self.parts.source.remember(at)
        state = generator.get_state()
        self._draw_workers_seed()
        try:
            return self.parts.source.remember(at)
        finally:
            generator.set_state(state)

    def place(self) -> Place:
        """Return where the batch in the user's hands is found again."""
        track = self.parts.track
        return Place(track.start, track.steps, track.begun)

    def extent(self, place: Place | None = None) -> Extent:
        """Return the global batch that the batch at `place`, or the one in the user's hands, is this rank's part of."""
        start, steps, begun = place or self.place()
        if self.parts.source.unit == "stream":
            return (start.epoch, begun + steps - 1, begun + steps)
        first, end = (self.parts.source.skipped(start, number).consumed for number in (steps - 1, steps))
        return (start.epoch, first, end)

    def number(self, place: Place | None = None) -> int | None:
        """The number of that batch in its epoch, from 1; None when it is not known, as after a resume on other ranks."""
        total = self.parts.total_batch_size
        if total is None or self.parts.source.unit != "samples":
            return None
        number, rest = divmod(self.extent(place)[1], total)
        return None if rest else number + 1

    def leave_out(self, batches: Iterable[Extent]) -> None:
        """Read past these global batches from now on, also after a resume. Ranks: every rank, the same."""
        self.parts.track.left_out.update(batches)

    def _is_left_out(self) -> bool:
        epoch, first, end = self.extent()
        return any(one[0] == epoch and one[1] < end and first < one[2] for one in self.parts.track.left_out)

    def samples(self, place: Place | None = None) -> list[int] | None:
        """Dataset indices of a batch of this rank: of the one in the user's hands, or of the one at `place`.

        None when they cannot be computed: a stream, or a sampler of the user's own. Padding is left out.
        """
        start, steps, _ = place or self.place()
        assignment = getattr(self.parts.source, "assignment", None)
        return None if assignment is None or steps == 0 else assignment.batch_of(start, steps - 1)

    def __len__(self) -> int:
        steps = self.parts.source.steps()
        if steps is None:
            kind = "its dataset is a stream" if isinstance(self.dataset, IterableDataset) else "its sampler has none"
            raise TypeError(f"this loader has no length: {kind}. Count batches as they come, or give it a __len__.")
        return max(steps - self.parts.skip, 0)

    @property
    def num_done(self) -> int:
        """The batches of the epoch before the first that the next pass gives on this rank."""
        return standing.num_done(self)

    def set_epoch(self, epoch: int) -> None:
        """Begin at `epoch` when iterated next; without a call, every pass takes the next epoch by itself."""
        self.parts.track.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Return where the loop stands on this rank, as JSON values: all it takes to go on as if never stopped."""
        parts = self.parts
        track = parts.track
        source = parts.source
        if parts.cursor.cut and not track.fresh:  # the loop it was read in is over, so its pass is too
            track.place(track.upcoming())
        at = source.reached(track.start, track.steps, track.mark) if track.steps else self._remembered(track.start)
        state = encode(at, parts.source.unit, parts.source.size())
        if (assignment := getattr(source, "assignment", None)) is not None and (reading := assignment.reading()):
            state["reading"] = reading
        if self.persistent_workers and not at.consumed:
            state["lasting"] = self._has_workers()
        if source.unit == "stream" and at.consumed:
            state["batches"] = track.begun + track.steps
        if track.left_out:
            state["left_out"] = sorted(map(list, track.left_out))
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Make the next iteration go on where `state` was taken, also on another number of processes.

        Raises: DataError when the state belongs to other data.
        """
        parts = self.parts
        parts.track.place(decode(state, parts.source.unit, parts.source.size()), state.get("batches", 0))
        parts.track.lasting = state.get("lasting")
        parts.track.left_out = {(epoch, first, end) for epoch, first, end in state.get("left_out", ())}

    @contextmanager
    def even(self, even_batches: bool) -> Iterator[None]:
        """A block in which epochs are begun with this `even_batches` instead of the configured one."""
        parts = self.parts
        self.parts = replace(parts, source=parts.source.copied(even_batches))
        try:
            yield
        finally:
            self.parts = parts

    def skipping(self, num_batches: int) -> Loader:
        """The same loader, beginning every epoch `num_batches` later; it shares this loader's position."""
        parts = replace(self.parts, source=self.parts.source.copied(), skip=self.parts.skip + num_batches)
        loader = copy.copy(self)
        loader.__dict__.update(_iterator=None, parts=parts)
        return loader


def forward_epoch(target: object, epoch: int) -> None:
    """Tell the dataset which epoch begins, when it wants to know."""
    set_epoch = getattr(target, "set_epoch", None)
    if callable(set_epoch):
        set_epoch(epoch)


def plain_move(put: Callable[[Any], Any]) -> Move:  # Any: a batch of the user's
    """Return a move that handles one batch after the other, when it is asked for."""

    def move(items: Iterable[Item]) -> Iterator[Item]:
        for batch, padding, last, mark in items:
            yield put(batch), padding, last, mark

    return move


# Any in this file: batches and indices are the user's own objects.


class SkippedBatches(BatchSampler):
    """The user's batch sampler without its first batches."""

    def __init__(self, batch_sampler: Any, skip_batches: int = 0) -> None:
        self.batch_sampler = batch_sampler
        self.skip_batches = skip_batches
        self.sampler = getattr(batch_sampler, "sampler", None)  # type: ignore[assignment] # shown as the user's has it
        self.batch_size = getattr(batch_sampler, "batch_size", None)  # type: ignore[assignment]
        self.drop_last = getattr(batch_sampler, "drop_last", False)

    def __iter__(self) -> Iterator[list[Any]]:
        if type(self.batch_sampler) is BatchSampler and type(self.sampler) is SequentialSampler:
            start = self.skip_batches * self.batch_size
            left = range(start, max(len(self.sampler), start))
            return iter(BatchSampler(left, self.batch_size, self.drop_last))
        return islice(iter(self.batch_sampler), self.skip_batches, None)

    def __len__(self) -> int:
        return max(len(self.batch_sampler) - self.skip_batches, 0)


class SkippedItems:
    """The user's sampler, or a loader's batches, without the first ones."""

    def __init__(self, items: Any, num_items: int) -> None:
        self.items = items
        self.num_items = num_items

    def __iter__(self) -> Iterator[Any]:
        return islice(iter(self.items), self.num_items, None)

    def __len__(self) -> int:
        return max(len(self.items) - self.num_items, 0)


class SkippingLoader(DataLoader[Any]):
    """A loader over a stream that reads past its first batches."""

    skip_batches: int

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override] # torch promises its private iterator class
        return islice(super().__iter__(), self.skip_batches, None)

    def __len__(self) -> int:
        return max(super().__len__() - self.skip_batches, 0)


def skip_first_batches(dataloader: DataLoader[Any], num_batches: int = 0) -> DataLoader[Any]:
    """Return the loader, beginning `num_batches` later in every epoch, every setting kept.

    Counts from the beginning of the epoch: on a prepared loader, a position loaded before is replaced, not added to.
    Costs nothing but arithmetic for prepared map-style data; a stream has to be read past them.
    """
    if num_batches < 0:
        raise ConfigError(f"skip_first_batches got num_batches={num_batches}; batches can be skipped forwards only.")
    if isinstance(dataloader, Loader):
        return dataloader.skipping(num_batches)
    if dataloader._dataset_kind:  # torch's mark of a stream: its samplers carry no indices
        stream = SkippingLoader.__new__(SkippingLoader)
        stream.__dict__.update(dataloader.__dict__, _iterator=None, skip_batches=num_batches)
        return stream
    if dataloader.batch_sampler is None:
        return engine_of(dataloader, sampler=SkippedItems(dataloader.sampler, num_batches))
    return engine_of(dataloader, batch_sampler=SkippedBatches(dataloader.batch_sampler, num_batches))
