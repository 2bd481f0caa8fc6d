"""Dispatching source: one rank reads and forms each step, and every rank receives its share of it."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from itertools import chain, islice
from typing import Any, NamedTuple, Protocol

import torch

from hasten.comm.base import Comm
from hasten.data.batch_plan import DataRanks
from hasten.data.position import Position
from hasten.data.prefetch import with_next
from hasten.data.sampler import IndexBatch
from hasten.data.source import BatchSource, IndexedSource, Item, OuterSource
from hasten.errors import PeerFailedError

# Any in this file: batches are the user's nested values.


class Round(NamedTuple):
    """One step: an item for every data-parallel rank that has one, and whether another step follows."""

    items: list[Item | None]
    more: bool


class DispatchReader(Protocol):
    """Protocol of the reading rank: it turns a position into rounds."""

    def rounds(self, source: BatchSource, position: Position) -> Iterator[Round]:
        """Yield the steps from `position` to the end of the epoch, read through `source`."""
        ...

    def steps(self, source: BatchSource) -> int | None:
        """Return the number of batches for this rank in a whole epoch, when known."""
        ...

    @property
    def per_round(self) -> int:
        """Number of batches of `source` in one round."""
        ...


class _RankMessage(NamedTuple):
    """Message for one rank in one step."""

    item: Item | None
    more: bool
    error: str | None = None


def _scatter(comm: Comm, messages: Sequence[bytes] | None) -> bytes:
    """Return this member's message; only the first member passes them. Ranks: every member."""
    sizes = rows = None
    if messages is not None:
        width = max(map(len, messages))
        sizes = [torch.tensor([width, len(message)]) for message in messages]
    width, length = comm.scatter(sizes, torch.empty(2, dtype=torch.int64)).tolist()
    if messages is not None:
        padded = [bytearray(message.ljust(width, b"\0")) for message in messages]
        rows = [torch.frombuffer(row, dtype=torch.uint8) for row in padded]
    own_row = comm.scatter(rows, torch.empty(width, dtype=torch.uint8))
    return own_row[:length].numpy().tobytes()


class DispatchSource(OuterSource):
    """Source in which one rank reads; the others receive their share of each step in one scatter."""

    def __init__(
        self,
        inner: BatchSource,
        reader: DispatchReader,
        comm: Comm,
        data_ranks: DataRanks,
    ) -> None:
        super().__init__(inner)
        self._reader = reader
        self._comm = comm
        self._data_ranks = data_ranks

    def steps(self) -> int | None:
        return self._reader.steps(self._inner)

    def open(self, position: Position) -> Iterator[Item]:
        if self._comm.size == 1:
            return self._read_alone(position)
        return self._send(position) if self._comm.rank == 0 else self._receive()

    # Any: of the inner source
    def reached(self, start: Position, steps: int, source_state: Any) -> Position:
        return self._inner.reached(start, steps * self._reader.per_round, source_state)

    def skipped(self, start: Position, num_batches: int) -> Position:
        return self._inner.skipped(start, num_batches * self._reader.per_round)

    def copied(self, even: bool | None = None) -> DispatchSource:
        inner = self._inner.copied(even)
        return DispatchSource(inner, self._reader, self._comm, self._data_ranks)

    def _read_alone(self, position: Position) -> Iterator[Item]:
        for step in self._reader.rounds(self._inner, position):
            yield from (item for item in step.items if item is not None)

    def _send(self, position: Position) -> Iterator[Item]:
        rounds = self._reader.rounds(self._inner, position)
        num_shards, encode = self._data_ranks.num_shards, self._comm.codec.encode
        has_more = True
        while has_more:
            try:
                step = next(rounds, None) or Round([None] * num_shards, False)
                messages = [
                    encode(_RankMessage(item, step.more)) for item in step.items
                ]
            # the waiting ranks must learn of any error of the user's dataset
            except Exception as error:
                message = _RankMessage(None, False, f"{type(error).__name__}: {error}")
                _scatter(self._comm, [encode(message)] * self._comm.size)
                raise
            shard_of = self._data_ranks.shard_of
            _scatter(self._comm, [messages[shard] for shard in shard_of])
            has_more = step.more
            own_item = step.items[self._data_ranks.shard]
            if own_item is not None:
                yield own_item

    def _receive(self) -> Iterator[Item]:
        has_more = True
        while has_more:
            message = self._comm.codec.decode(_scatter(self._comm, None))
            item, has_more, error = message
            if error is not None:
                raise PeerFailedError(
                    f"rank {self._comm.ranks[0]}, which reads the data for all ranks, failed with {error}; so this rank has no batch. "
                    "See the traceback of that rank."
                )
            if item is not None:
                yield item


class IndexedReader:
    """Reader of map-style data: the indices are cut for every rank first, so each share is collated separately."""

    per_round = 1

    def steps(self, source: BatchSource) -> int | None:
        return source.steps()

    def rounds(self, source: BatchSource, position: Position) -> Iterator[Round]:
        assert isinstance(source, IndexedSource), (
            "indices are cut for indexed data only"
        )
        index_batches = with_next(source.assignment.rounds(position))
        plans: deque[tuple[list[IndexBatch | None], bool]] = deque()

        def flat() -> Iterator[IndexBatch]:
            for step, following in index_batches:
                plans.append((step, following is not None))
                yield from (
                    index_batch for index_batch in step if index_batch is not None
                )

        items = source.read(flat(), position)
        for first in items:
            step, has_more = plans.popleft()
            other_items = islice(
                items, sum(index_batch is not None for index_batch in step) - 1
            )
            read = chain([first], other_items)
            yield Round(
                [None if index_batch is None else next(read) for index_batch in step],
                has_more,
            )


class StreamReader:
    """Reader of streams: the elements of a round are cut for every rank before they are collated."""

    per_round = 1

    def steps(self, source: BatchSource) -> int | None:
        return source.steps()

    def rounds(self, source: BatchSource, position: Position) -> Iterator[Round]:
        for (rank_batches, _, _, state), following in with_next(source.open(position)):
            left = [None] * len(rank_batches) if following is None else following[0]
            items = [
                None if rank_batch is None else (*rank_batch, later is None, state)
                for rank_batch, later in zip(rank_batches, left, strict=True)
            ]
            yield Round(items, following is not None)
