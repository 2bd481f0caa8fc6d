"""Where prepared loaders stand, and which of those being iterated a step reads from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Protocol

from hasten.errors import DataError, StepError


@dataclass(slots=True, eq=False)
class LoaderCursor:
    """Where one prepared loader stands; moved by the loader, read by everyone else."""

    epoch: int = 0
    batch: int = 0
    """Batches handed to the user in this epoch."""
    at_end: bool = False
    """The batch now in the user's hands is the epoch's last."""
    num_real: int | None = None
    """Rows of the current batch on this rank that are not padding; None means all of them."""
    num_rows: int | None = None
    """Rows of the current batch on this rank, padding included; None means not known."""
    given: Any = None  # Any: a batch of the user's
    """The current batch, which error messages describe; None outside an iteration."""
    pads_like: tuple[Any, ...] | None = None
    """Equal for loaders whose batches of the same number are padded alike; None when not known."""
    opened: int = 0
    """When its iteration began, counted in moves of all loaders; 0 when it is not iterated."""
    moved: int = 0
    """When it gave its latest batch, counted likewise."""
    partners: set[int] = field(default_factory=set)
    """Loaders (by identity) that were being iterated when this one moved: they are read beside it, not inside it."""
    num_ended: int = 0
    """Passes read to the end since the epoch's body began, but for those inside a pass over another loader."""
    num_again: int = 0
    """The next passes that give no batches: the resumed epoch had read them to the end."""
    left: bool = False
    """The latest pass was left by `break` after training on its batches."""
    cut: bool = False
    """The latest pass ended because a loader that was read beside it ran out."""
    nests: bool = False
    """It is taken to be iterated inside those opened before it, also where they move beside each other."""


class CountsPasses(Protocol):
    """The clock: it counts the backward passes of the run."""

    num_passes: int


@dataclass(slots=True)
class Watch:
    """Context manager that marks a loader as being iterated, also when loaders end out of order."""

    cursors: Cursors
    cursor: LoaderCursor
    clock: CountsPasses
    _num_passes: int = 0

    def __enter__(self) -> LoaderCursor:
        self._num_passes = self.clock.num_passes
        if not self.cursor.opened:
            self.cursors.opening(self.cursor)
        self.cursors.watched.append(self.cursor)
        return self.cursor

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        trained = self.clock.num_passes > self._num_passes
        self.cursors.closed(self.cursor, exhausted=kind is None, trained=trained)


@dataclass(slots=True)
class Cursors:
    """The loaders being iterated.

    One that was opened after another's latest batch is iterated inside it (an evaluation within a training loop), and
    the outer one rests meanwhile. Loaders that move beside each other, by `zip` or by `next`, are all active; the one
    that moves first in a step leads it, and its end is the end of the loop.
    """

    watched: list[LoaderCursor] = field(default_factory=list)
    followed: LoaderCursor | None = None
    """The loader that the caller named for this step."""
    go_back: Callable[[LoaderCursor], None] | None = None
    """Called with a loader before it gives its next batch, while the run is to go back to a checkpoint."""
    before_next: Callable[[LoaderCursor], None] | None = None
    """Called with a loader before it gives its next batch, or ends."""
    times_back: int = 0
    """How often the run has gone back: an iteration that began before goes on from the loader's new position."""
    num_ended: int = 0
    """Passes with training that were read to the end."""
    _exhausted: LoaderCursor | None = None
    """The loader that ran out last, unless another pass has begun since."""
    _now: int = 0
    _ticked: int = 0
    _leader: LoaderCursor | None = None
    _cut_short: tuple[LoaderCursor, int] | None = None
    """A leader that had moved when another loader ran out, and when its iteration began."""

    def opening(self, cursor: LoaderCursor) -> None:
        """Note that an iteration begins."""
        self._now += 1
        cursor.opened, cursor.moved, cursor.left, cursor.cut = self._now, 0, False, False
        cursor.partners.clear()
        self._exhausted = None

    def moving(self, cursor: LoaderCursor) -> None:
        """Note that the loader gives its next batch."""
        if cursor.nests:
            return
        self._now += 1
        cursor.moved = self._now
        if len(self.watched) > 1:
            cursor.partners.update(id(other) for other in self.watched if other is not cursor)

    def closed(self, cursor: LoaderCursor, exhausted: bool, trained: bool = False) -> None:
        """Note that an iteration is over, because the loader ran out or the loop was left; with backward passes if `trained`."""
        for index in range(len(self.watched) - 1, -1, -1):
            if self.watched[index] is cursor:
                del self.watched[index]
                break
        cursor.opened, cursor.given = 0, None
        if exhausted:
            self._exhausted = cursor
            self.num_ended += trained
            cursor.num_ended += all(id(cursor) in other.partners for other in self.watched)
        else:
            cursor.cut = id(self._exhausted) in cursor.partners
            cursor.left = trained and not cursor.cut
        if exhausted and self.watched:
            leader = self._leader
            unused = leader is not None and leader.moved > self._ticked and id(cursor) in leader.partners
            if leader is not None and unused and any(one is leader for one in self.watched):
                self._cut_short = (leader, leader.opened)

    def active(self) -> list[LoaderCursor]:
        """Return the loaders that the current step reads from, in the order in which they were first moved."""
        watched = self.watched
        if len(watched) < 2:
            return watched
        return [
            one
            for one in watched
            if not any(
                other.opened > max(one.moved, one.opened) and id(other) not in one.partners
                for other in watched
                if other is not one
            )
        ]

    def innermost(self) -> LoaderCursor | None:
        """Return the loader that was opened last of those being iterated."""
        active = self.active()
        return active[-1] if active else None

    def only(self) -> LoaderCursor | None:
        """Return the loader that the current step reads from, or None outside a loop over one.

        Raises: DataError when there are several, and their padding may differ.
        """
        active = self.active()
        first = active[0] if active else None
        if first is not None and any(
            one.pads_like is None or (one.pads_like, one.batch) != (first.pads_like, first.batch) for one in active[1:]
        ):
            raise DataError(
                f"gather_for_metrics() was called while {len(active)} loaders are being iterated beside each other, so it "
                f"cannot know whose padding to drop. Say which: gather_for_metrics(results, loader=...)."
            )
        return active[-1] if active else None

    def tick(self, within_window: bool) -> bool:
        """Begin a micro-step; whether the loader that leads it is at its end.

        Raises: StepError when the loop before this one ended inside a window without anybody having known.
        """
        if self._cut_short is not None:
            self._check_cut(within_window)
        if self.followed is not None:
            leader: LoaderCursor | None = self.followed
        else:
            leader = self.watched[0] if len(self.watched) == 1 else self._lead()
        self._leader, self._ticked = leader, self._now
        return leader is not None and leader.at_end

    def _lead(self) -> LoaderCursor | None:
        active = self.active()
        if len(active) < 2:
            return active[0] if active else None
        fresh = [one for one in active if one.moved > self._ticked]
        if fresh:
            return min(fresh, key=lambda one: one.moved)
        return self._leader if any(one is self._leader for one in active) else active[-1]

    def _check_cut(self, within_window: bool) -> None:
        assert self._cut_short is not None, "asked only when a leader was cut short"
        (leader, opened), self._cut_short = self._cut_short, None
        if within_window and leader.opened != opened:
            raise StepError(
                "the last loop read from several loaders and ended with one that does not lead it, inside an "
                "accumulation window; the gradients of that window would leak into this one. Put the shortest loader "
                "first, as in zip(short, long), or name the one that ends the loop: accumulate(model, loader=short)."
            )


class StepMarks(Protocol):
    """Told where a training step stands; each call takes the time since the one before."""

    def asked(self) -> None:
        """The loop asks its loader for the next batch."""
        ...

    def got(self, num_samples: int) -> None:
        """The loader hands a batch out, of so many samples over all ranks."""
        ...

    def optimizer_begins(self) -> None:
        """An optimizer begins an update."""
        ...

    def optimizer_done(self) -> None:
        """An optimizer has tried an update."""
        ...

    def skipped(self) -> None:
        """The update was skipped: gradients overflowed."""
        ...
