"""Order of a rank whose loader holds a separate shard of the data, with a number of steps common to all ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any, Final, Literal

import torch

from hasten.comm.base import Comm
from hasten.data.batch_plan import Indices
from hasten.data.foreign import ForeignSplit
from hasten.data.order import SampleOrder, SharedOrder
from hasten.data.position import Part, Position
from hasten.errors import ConfigError, DataError, PeerFailedError

# Any in this file: units are of any type.
Fit = Literal["longest", "shortest", "own"]
"""End of shards of different size: with the longest, padded by repeating first units; with the shortest; alone."""

_CHUNK: Final = 1024
_FAILED: Final = -1


class PartOrder:
    """The units of this rank's shard, and padding if the shard of another rank is longer.

    If units are computed, prepare() has exchanged the sizes of all shards. If they are drawn from a sampler, ranks
    exchange their counts after every 1024 units, because a sampler may yield more or fewer than its length says.
    """

    def __init__(self, order: SampleOrder, comm: Comm, sizes: list[int | None], fit: Fit) -> None:
        self.inner = order
        self._comm = comm
        self._sizes = sizes
        self._fit: Fit = fit if comm.size > 1 else "own"
        self._num_drawn: int | None = None
        """Number of units of the shard, once all of them are drawn."""

    @property
    def as_torch(self) -> bool:
        return self.inner.as_torch

    def fitted(self, fit: Fit) -> PartOrder:
        """Return the same order with another end."""
        return PartOrder(self.inner, self._comm, self._sizes, fit)

    def size(self) -> int | None:
        sizes = [size for size in self._sizes if size is not None]
        if self._fit == "own" or len(sizes) < len(self._sizes):
            return self.inner.size() if self._fit == "own" else None
        return max(sizes) if self._fit == "longest" else min(sizes)

    def part(self, num_parts: int) -> Part:
        """Return the shard as recorded in positions; a sampler's length may change from epoch to epoch."""
        return (num_parts, None if isinstance(self.inner, SharedOrder) else self.inner.size())

    def num_real(self) -> int | None:
        """Return the number of units of the shard itself; None while it is unknown and no padding was yielded."""
        return self._num_drawn

    def begin(self, at: Position) -> Position:
        return self.inner.begin(at)

    def seek(self, at: Position) -> Callable[[Indices], Indices] | None:
        found = self.inner.seek(at)
        if found is None:
            return None
        size, prepared = self.inner.size() or 0, self._sizes[self._comm.rank]
        if size != prepared and self._fit != "own":
            raise DataError(
                f"this rank's part of the data has {size} samples, and had {prepared} when it was prepared; other ranks rely on that "
                "number, so some would wait forever. Prepare a new loader, or keep the length."
            )
        self._num_drawn = size
        return lambda positions: found(positions % max(size, 1))

    def draw(self, at: Position) -> Iterator[Any]:
        self._num_drawn = None
        units = self.inner.draw(at)
        if self._fit == "own":
            yield from units
            return
        head: list[Any] = []
        given = 0
        while True:
            chunk, counts = self._exchanged(units)
            head = head or chunk
            self._refuse_empty(counts, given)
            most = max(counts) if self._fit == "longest" else min(counts)
            if len(chunk) < _CHUNK and self._num_drawn is None:
                self._num_drawn = given + len(chunk)
            yield from chunk[:most]
            for place in range(given + len(chunk), given + most):
                yield head[(place - (self._num_drawn or 0)) % len(head)]
            given += most
            if most < _CHUNK:
                return

    def _exchanged(self, units: Iterator[Any]) -> tuple[list[Any], list[int]]:
        """Return the next units of this rank, and the number of units on each rank.

        Raises: the sampler's error; PeerFailedError on the other ranks.
        """
        error: Exception | None = None
        chunk: list[Any] = []
        try:
            chunk = list(islice(units, _CHUNK))
        except Exception as raised:  # errors of the user's sampler must reach the waiting ranks
            error = raised
        mine = torch.tensor([_FAILED if error is not None else len(chunk)], dtype=torch.int64)
        counts: list[int] = self._comm.all_gather(mine).flatten().tolist()
        if error is not None:
            raise error
        failed = [self._comm.ranks[member] for member, count in enumerate(counts) if count == _FAILED]
        if failed:
            raise PeerFailedError(
                f"the sampler raised on rank(s) {', '.join(map(str, failed))}, so this rank would wait for them at the end of "
                f"the epoch. See the traceback of that rank."
            )
        return chunk, counts

    def _refuse_empty(self, counts: list[int], given: int) -> None:
        empty = [self._comm.ranks[member] for member, count in enumerate(counts) if not count]
        if self._fit == "longest" and not given and 0 < len(empty) < len(counts):
            raise empty_part(empty, len(counts))


def empty_part(ranks: list[int], num_ranks: int) -> DataError:
    """Return the error for ranks that have no sample to take a step with."""
    return DataError(
        f"the part of rank(s) {', '.join(map(str, ranks))} of {num_ranks} has no samples, so these ranks could not take part in a step. "
        "Give every rank a part with samples; with drop_last=True the epoch ends with the shortest part, with even_batches=False each "
        "rank ends separately."
    )


def fit_of(even: bool, drop_last: bool) -> Fit:
    """Return the fit of shards of different size."""
    return "own" if not even else "shortest" if drop_last else "longest"


def check_split(split: ForeignSplit, shard: int, num_shards: int, world_size: int, rank: int) -> None:
    """Raise unless a dataset splits itself as the mesh does."""
    by_rank = (world_size, rank) if split.num_ranks is None else (split.num_ranks, split.rank)
    if by_rank != (num_shards, shard):
        raise DataError(
            f"the dataset is split by {split.by} into {by_rank[0]} parts, of which this is part {by_rank[1]}, and this process "
            f"reads as {shard} of {num_shards} data-parallel ones; samples would be lost or read twice. Split it into "
            f"{num_shards} parts by the data-parallel index, or remove the split: prepare() shards the loader."
        )


def refuse_settings(dispatch: bool, split: bool, batched: bool) -> None:
    """Raise ConfigError for settings that are incompatible with a loader that is sharded already."""
    if dispatch:
        raise ConfigError(
            "dispatch_batches=True with data that is already sharded: the reading rank would only see its part, and the rest would "
            "never be read. Remove one of the two."
        )
    if split and not batched:
        raise ConfigError(
            "split_batches=True with data that is already sharded and a custom batch sampler: no rank has rows of another rank's "
            "batches. Set split_batches=False, or give the loader a batch_size."
        )
