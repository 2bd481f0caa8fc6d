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
    has_more: bool


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
    has_more: bool
    error: str | None = None


def _scatter_messages(comm: Comm, messages: Sequence[bytes] | None) -> bytes:
    """Return this member's message; only the first member passes them. Ranks: every member."""
    message_sizes = message_rows = None
    if messages is not None:
        row_bytes = max(map(len, messages))
        message_sizes = [
            torch.tensor([row_bytes, len(message)]) for message in messages
        ]
    row_bytes, message_bytes = comm.scatter(
        message_sizes, torch.empty(2, dtype=torch.int64)
    ).tolist()
    if messages is not None:
        padded_messages = [
            bytearray(message.ljust(row_bytes, b"\0")) for message in messages
        ]
        message_rows = [
            torch.frombuffer(padded_message, dtype=torch.uint8)
            for padded_message in padded_messages
        ]
    own_row = comm.scatter(message_rows, torch.empty(row_bytes, dtype=torch.uint8))
    return own_row[:message_bytes].numpy().tobytes()


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
            return self._read_on_one_process(position)
        if self._comm.rank == 0:
            return self._send_rounds(position)
        return self._receive_items()

    # Any: of the inner source
    def reached(self, start: Position, steps: int, source_state: Any) -> Position:
        return self._inner.reached(start, steps * self._reader.per_round, source_state)

    def skipped(self, start: Position, num_batches: int) -> Position:
        return self._inner.skipped(start, num_batches * self._reader.per_round)

    def copied(self, even: bool | None = None) -> DispatchSource:
        inner = self._inner.copied(even)
        return DispatchSource(inner, self._reader, self._comm, self._data_ranks)

    def _read_on_one_process(self, position: Position) -> Iterator[Item]:
        for round_ in self._reader.rounds(self._inner, position):
            yield from (item for item in round_.items if item is not None)

    def _send_rounds(self, position: Position) -> Iterator[Item]:
        rounds = self._reader.rounds(self._inner, position)
        num_shards = self._data_ranks.num_shards
        encode = self._comm.codec.encode
        has_more = True
        while has_more:
            try:
                round_ = next(rounds, None) or Round([None] * num_shards, False)
                messages = [
                    encode(_RankMessage(item, round_.has_more)) for item in round_.items
                ]
            # the waiting ranks must learn of any error of the user's dataset
            except Exception as error:
                message = _RankMessage(None, False, f"{type(error).__name__}: {error}")
                _scatter_messages(self._comm, [encode(message)] * self._comm.size)
                raise
            shard_of = self._data_ranks.shard_of
            _scatter_messages(
                self._comm, [messages[rank_shard] for rank_shard in shard_of]
            )
            has_more = round_.has_more
            own_item = round_.items[self._data_ranks.shard]
            if own_item is not None:
                yield own_item

    def _receive_items(self) -> Iterator[Item]:
        has_more = True
        while has_more:
            message = self._comm.codec.decode(_scatter_messages(self._comm, None))
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
        planned_rounds: deque[tuple[list[IndexBatch | None], bool]] = deque()

        def flat() -> Iterator[IndexBatch]:
            for round_batches, following in index_batches:
                planned_rounds.append((round_batches, following is not None))
                yield from (
                    index_batch
                    for index_batch in round_batches
                    if index_batch is not None
                )

        items = source.open(position, flat())
        for first_item in items:
            round_batches, has_more = planned_rounds.popleft()
            following_items = islice(
                items, sum(index_batch is not None for index_batch in round_batches) - 1
            )
            round_items = chain([first_item], following_items)
            yield Round(
                [
                    None if index_batch is None else next(round_items)
                    for index_batch in round_batches
                ],
                has_more,
            )


class StreamReader:
    """Reader of streams: the elements of a round are cut for every rank before they are collated."""

    per_round = 1

    def steps(self, source: BatchSource) -> int | None:
        return source.steps()

    def rounds(self, source: BatchSource, position: Position) -> Iterator[Round]:
        for (rank_batches, _, _, state), following in with_next(source.open(position)):
            if following is None:
                next_batches = [None] * len(rank_batches)
            else:
                next_batches = following[0]
            rank_items = [
                None if rank_batch is None else (*rank_batch, next_batch is None, state)
                for rank_batch, next_batch in zip(
                    rank_batches, next_batches, strict=True
                )
            ]
            yield Round(rank_items, following is not None)
