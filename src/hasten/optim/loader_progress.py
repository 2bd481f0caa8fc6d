"""Progress of prepared loaders, and selection of the loaders that a step reads from."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from hasten import trees
from hasten.errors import DataError, StepError


@dataclass(slots=True, eq=False)
class LoaderCursor:
    """Progress of one prepared loader; written by the loader, read by other modules."""

    epoch: int = 0
    batch: int = 0
    """Number of batches returned in this epoch."""
    at_end: bool = False
    """True if the current batch is the epoch's last."""
    num_real: int | None = None
    """Number of rows of the current batch on this rank that are not padding; None for all."""
    num_rows: int | None = None
    """Number of rows of the current batch on this rank, padding included; None if unknown."""
    num_samples: int | None = None
    """Number of samples of the current batch over all ranks, without padding; None if batches vary."""
    current_batch: Any = None  # Any: a batch of the user
    """The current batch, for error messages; None outside an iteration."""
    pads_like: tuple[Any, ...] | None = None
    """Equal for loaders whose batches of the same number have equal padding; None if unknown."""
    opened: int = 0
    """Time at which its iteration started, counted in moves of all loaders; 0 when it is not iterated."""
    moved: int = 0
    """Time of its latest batch, in the same count."""
    partners: set[int] = field(default_factory=set)
    """Loaders (by id) that were being iterated when this one moved: they are read alongside, not nested."""
    num_ended: int = 0
    """Number of complete passes since the start of the epoch's body, except those nested in another loader's pass."""
    num_again: int = 0
    """Number of next passes that yield no batches, because the resumed epoch had completed them."""
    passes_before: int = 0
    """Number of backward passes of the run when its latest iteration began."""
    passes_at_batch: int = 0
    """Number of backward passes of the run when it returned its latest batch."""
    left: bool = False
    """True if the latest pass was left by `break` after training on its batches."""
    cut: bool = False
    """True if the latest pass ended because a loader that was read alongside ran out."""
    nests: bool = False
    """True if it counts as nested in the loaders opened before it, even if they move alongside each other."""

    def sum_over_ranks(self, amount: int, num_ranks: int) -> int:
        """Return an amount in this rank's batch, such as its tokens, over all ranks that read other samples, without padding."""
        if not self.at_end or self.num_samples is None:
            return amount * num_ranks
        num_rows = self.num_rows or trees.batch_size(self.current_batch)
        return amount * self.num_samples // num_rows if num_rows else amount * num_ranks


@dataclass(slots=True)
class ActiveLoaders:
    """The loaders being iterated.

    A loader that was opened after another's latest batch is nested in it (an evaluation within a training loop), and
    the outer one is inactive meanwhile. Loaders that move alongside each other, by `zip` or by `next`, are all active;
    the one that moves first in a step leads it, and its end is the end of the loop.
    """

    watched: list[LoaderCursor] = field(default_factory=list)
    followed: LoaderCursor | None = None
    """The loader that the caller named for this step."""
    _exhausted: LoaderCursor | None = None
    """The loader that ran out last, unless another pass has started since."""
    num_moves: int = 0
    """Time, counted in moves of all loaders."""
    exhausted_at: int = -1
    """Time at which a loader ran out last."""
    _ticked: int = 0
    _leader: LoaderCursor | None = None
    _cut_short: tuple[LoaderCursor, int] | None = None
    """A leader that had moved when another loader ran out, and the time its iteration started."""

    def record_start(self, cursor: LoaderCursor) -> None:
        """Record the start of an iteration."""
        self.num_moves += 1
        cursor.opened = self.num_moves
        cursor.moved = 0
        cursor.left = False
        cursor.cut = False
        cursor.partners.clear()
        self._exhausted = None

    def record_batch(self, cursor: LoaderCursor) -> None:
        """Record that the loader returns its next batch."""
        if cursor.nests:
            return
        self.num_moves += 1
        cursor.moved = self.num_moves
        if len(self.watched) > 1:
            cursor.partners.update(
                id(watched_cursor)
                for watched_cursor in self.watched
                if watched_cursor is not cursor
            )

    def has_moved_since(self, time: int, besides: LoaderCursor) -> bool:
        """Return True if a loader that is being iterated, other than that of `besides`, has returned a batch since `time`."""
        return any(
            cursor.moved > time for cursor in self.watched if cursor is not besides
        )

    def record_end(
        self, cursor: LoaderCursor, exhausted: bool, trained: bool = False
    ) -> None:
        """Record the end of an iteration, by exhaustion or by leaving the loop; `trained` if it had backward passes."""
        for index in range(len(self.watched) - 1, -1, -1):
            if self.watched[index] is cursor:
                del self.watched[index]
                break
        cursor.opened = 0
        cursor.current_batch = None
        if exhausted:
            self._exhausted = cursor
            self.exhausted_at = self.num_moves
            cursor.num_ended += all(
                id(cursor) in watched_cursor.partners for watched_cursor in self.watched
            )
        else:
            cursor.cut = id(self._exhausted) in cursor.partners
            cursor.left = trained and not cursor.cut
        if exhausted and self.watched:
            leader = self._leader
            has_unused_batch = (
                leader is not None
                and leader.moved > self._ticked
                and id(cursor) in leader.partners
            )
            if (
                leader is not None
                and has_unused_batch
                and any(open_cursor is leader for open_cursor in self.watched)
            ):
                self._cut_short = (leader, leader.opened)

    def active_cursors(self) -> list[LoaderCursor]:
        """Return the loaders that the current step reads from, in the order of their first moves."""
        watched = self.watched
        if len(watched) < 2:
            return watched
        return [
            cursor
            for cursor in watched
            if not any(
                other_cursor.opened > max(cursor.moved, cursor.opened)
                and id(other_cursor) not in cursor.partners
                for other_cursor in watched
                if other_cursor is not cursor
            )
        ]

    def innermost_cursor(self) -> LoaderCursor | None:
        """Return the most recently opened of the active loaders."""
        active_cursors = self.active_cursors()
        return active_cursors[-1] if active_cursors else None

    def single_cursor(self) -> LoaderCursor | None:
        """Return the loader that the current step reads from; None outside a loop over one.

        Raises: DataError when there are several, and their padding may differ.
        """
        active_cursors = self.active_cursors()
        first_cursor = active_cursors[0] if active_cursors else None
        if first_cursor is not None and any(
            cursor.pads_like is None
            or (cursor.pads_like, cursor.batch)
            != (first_cursor.pads_like, first_cursor.batch)
            for cursor in active_cursors[1:]
        ):
            raise DataError(
                f"gather_for_metrics() was called while {len(active_cursors)} loaders are being iterated beside each other, so it "
                f"cannot know whose padding to drop. Say which: gather_for_metrics(results, loader=...)."
            )
        return active_cursors[-1] if active_cursors else None

    def tick(self, within_window: bool) -> bool:
        """Start a micro-step; return True if the loader that leads it is at its end.

        Raises: StepError when the previous loop ended undetected inside a window.
        """
        if self._cut_short is not None:
            self._check_cut(within_window)
        if self.followed is not None:
            leader: LoaderCursor | None = self.followed
        else:
            leader = self.watched[0] if len(self.watched) == 1 else self._find_leader()
        self._leader = leader
        self._ticked = self.num_moves
        return leader is not None and leader.at_end

    def _find_leader(self) -> LoaderCursor | None:
        active_cursors = self.active_cursors()
        if len(active_cursors) < 2:
            return active_cursors[0] if active_cursors else None
        moved_cursors = [
            cursor for cursor in active_cursors if cursor.moved > self._ticked
        ]
        if moved_cursors:
            return min(moved_cursors, key=lambda cursor: cursor.moved)
        if any(cursor is self._leader for cursor in active_cursors):
            return self._leader
        return active_cursors[-1]

    def _check_cut(self, within_window: bool) -> None:
        assert self._cut_short is not None, "asked only when a leader was cut short"
        (leader, opened), self._cut_short = self._cut_short, None
        if within_window and leader.opened != opened:
            raise StepError(
                "the last loop read from several loaders and ended with one that does not lead it, inside an "
                "accumulation window; the gradients of that window would leak into this one. Put the shortest loader "
                "first, as in zip(short, long), or name the one that ends the loop: accumulate(model, loader=short)."
            )
