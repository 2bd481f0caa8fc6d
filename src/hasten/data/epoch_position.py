"""Queries of a loader's position within its epoch, and ending of abandoned passes."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hasten.data.loader import Loader


def _runs(loader: Loader) -> bool:
    return any(one is loader.cursor for one in loader.parts.clock.cursors.watched)


def midway(loader: Loader) -> bool:
    """Return True if a resume starts inside an epoch: a pass runs, was left by `break`, or was resumed but not run."""
    track = loader.parts.track
    return track.start.consumed > 0 if track.fresh else loader.cursor.left or _runs(loader)


def leave(loader: Loader) -> None:
    """Reset the count of an epoch's passes and end a pass left by `break`: the next pass starts the next epoch."""
    track, cursor = loader.parts.track, loader.cursor
    cursor.num_ended = cursor.num_again = 0
    if not track.fresh and not _runs(loader):
        track.place(track.upcoming())


def num_done(loader: Loader) -> int:
    """Return the number of batches of the epoch before the first batch of the next pass on this rank."""
    source, track = loader.parts.source, loader.parts.track
    if loader.cursor.num_again:
        return len(loader)
    if not track.fresh or not track.start.consumed or loader.parts.skip:  # skipping counts from the epoch's first batch
        return 0
    at, steps, size = track.start, source.steps(), source.size()
    if source.unit == "stream" or steps is None or size is None:
        return track.begun
    first, every = replace(at, consumed=0), range(steps + 1)
    done = bisect_right(every, at.consumed, key=lambda number: source.skipped(first, number).consumed) - 1
    left = bisect_left(every, size, key=lambda number: source.skipped(at, number).consumed)
    return max(done, steps - left)  # with another world size, steps need not start where the saved ones ended
