"""The source in which one rank reads and every rank receives only its own part of each step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from hasten.comm.base import Comm
from hasten.data.position import Position
from hasten.data.source import Item, OuterSource, Source
from hasten.data.wire import Wire
from hasten.errors import PeerFailedError


class Round(NamedTuple):
    """One step: an item for every data-parallel rank that has one, and whether another step follows."""

    items: list[Item | None]
    more: bool


class Reader(Protocol):
    """What the reading rank does: turn a position into rounds."""

    def rounds(self, source: Source, at: Position) -> Iterator[Round]:
        """The steps from `at` to the end of the epoch, read through `source`."""
        ...

    def steps(self, source: Source) -> int | None:
        """Batches that this rank gets in a whole epoch, when known."""
        ...

    def evened(self, even: bool | None) -> Reader:
        """The same reader with another `even_batches`, when one is given."""
        ...

    @property
    def per_round(self) -> int:
        """Batches of `source` that one round takes."""
        ...


class _Parcel(NamedTuple):
    """What one rank receives in one step."""

    item: Item | None
    more: bool
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Seats:
    """Which data-parallel rank each process of the world is; the first process reads for all."""

    shard: int
    num_shards: int
    shard_of: tuple[int, ...]


class DispatchSource(OuterSource):
    """One rank reads; the others receive their parts of each step, in one scatter."""

    def __init__(self, inner: Source, reader: Reader, comm: Comm, seats: Seats) -> None:
        super().__init__(inner)
        self._reader = reader
        self._comm = comm
        self._seats = seats

    def steps(self) -> int | None:
        return self._reader.steps(self._inner)

    def open(self, at: Position) -> Iterator[Item]:
        wire = Wire(self._comm)
        return self._give(wire, at) if self._comm.rank == 0 else self._take(wire)

    def reached(self, start: Position, steps: int, mark: Any) -> Position:  # Any: a mark of the inner source
        return self._inner.reached(start, steps * self._reader.per_round, mark)

    def skipped(self, start: Position, num_batches: int) -> Position:
        return self._inner.skipped(start, num_batches * self._reader.per_round)

    def copied(self, even: bool | None = None) -> DispatchSource:
        return DispatchSource(self._inner.copied(even), self._reader.evened(even), self._comm, self._seats)

    def _give(self, wire: Wire, at: Position) -> Iterator[Item]:
        rounds = self._reader.rounds(self._inner, at)
        seats = self._seats
        more = True
        while more:
            try:
                step = next(rounds, None) or Round([None] * seats.num_shards, False)
                parcels = wire.pack([_Parcel(item, step.more) for item in step.items])
            except Exception as error:  # the ranks that wait must hear of whatever the user's dataset raised
                failed = wire.pack([_Parcel(None, False, f"{type(error).__name__}: {error}")])
                wire.send(failed * seats.num_shards, seats.shard_of)
                raise
            wire.send(parcels, seats.shard_of)
            more = step.more
            mine = step.items[seats.shard]
            if mine is not None:
                yield mine

    def _take(self, wire: Wire) -> Iterator[Item]:
        more = True
        while more:
            item, more, error = wire.receive()
            if error is not None:
                raise PeerFailedError(
                    f"rank {self._comm.ranks[0]}, which reads the data for all ranks, failed with {error}; this rank "
                    f"has no batch to go on with. Look at that rank's traceback."
                )
            if item is not None:
                yield item
