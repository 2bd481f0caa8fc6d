"""Going back: a run returns to its newest checkpoint, and the batches that spoiled it are left out from then on.

Decided before the update, done when the loop asks its loader for the next batch: no optimizer, scheduler or block of accumulation is at
work there, and the loop's own `for` simply goes on with the batches behind the checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from weakref import WeakKeyDictionary

from hasten.data.loader import Extent, Loader, Place
from hasten.optim.loader_progress import Cursors, LoaderCursor


class Rollback:
    """Takes a run back to its newest checkpoint, a limited number of times. Ranks: every rank does the same."""

    def __init__(
        self,
        newest: Callable[[], str | None],
        load: Callable[[str], object],
        cursors: Cursors,
        limit: int,
    ) -> None:
        self._newest = newest
        self._load = load
        self._cursors = cursors
        self.limit = limit
        self.times = 0
        """How often the run has gone back, or is about to."""
        self.target: str | None = None
        """The checkpoint to go back to, from the decision until it is done."""
        self._left_out: WeakKeyDictionary[Loader, set[Extent]] = WeakKeyDictionary()
        self._led: tuple[LoaderCursor, ...] = ()

    def refusal(self, knows_batches: bool) -> str:
        """Why the run cannot go back; empty when it can. Ranks: every rank."""
        if not knows_batches:
            return (
                "numbers=rollback needs to know the batches, and these did not come from a prepared loader; prepare() the loader, "
                "or use numbers=skip"
            )
        if self.times >= self.limit:
            return (
                f"the run has gone back {self.times} times already (numbers_rollbacks={self.limit}), so the data of single batches is "
                "hardly the cause"
            )
        if self._newest() is None:
            return (
                "this run has neither saved nor loaded a checkpoint to go back to; call save_state() before the first step and "
                "every so many updates"
            )
        return ""

    def decide(self, batches: Iterable[tuple[Loader, Place]]) -> str:
        """Go back before the next batch is given, and leave these out; where to. Ranks: every rank, when none refuses."""
        self.target = self._newest()
        assert self.target is not None, "asked only when nothing refuses"
        led = []
        for loader, place in batches:
            self._left_out.setdefault(loader, set()).add(loader.extent(place))
            led.append(loader.cursor)
        self._led = tuple(led)
        self.times += 1
        self._cursors.go_back = self._before_batch
        return self.target

    def _before_batch(self, cursor: LoaderCursor) -> None:
        if any(cursor is one for one in self._led):
            self.now()

    def now(self) -> bool:
        """Go back if it was decided; whether it was. Ranks: every rank."""
        target, self.target = self.target, None
        if target is None:
            return False
        self._cursors.go_back, self._led = None, ()
        self._load(target)
        for loader, batches in self._left_out.items():
            loader.leave_out(batches)  # the checkpoint knows only of those that were left out before it
        self._cursors.times_back += 1
        return True
