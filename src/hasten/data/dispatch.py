"""Dispatching source: one rank reads and forms each step, and every rank receives its share of it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice
from typing import Any, Final, NamedTuple, Protocol

import msgspec
import torch
from torch import Tensor

from hasten import trees
from hasten.comm.base import Comm
from hasten.comm.encoding import Codec
from hasten.data.batch_plan import DataRanks, Padding, cut
from hasten.data.position import Position
from hasten.data.prefetch import with_next
from hasten.data.sampler import IndexBatch
from hasten.data.source import BatchSource, IndexedSource, Item, OuterSource, own_copy
from hasten.data.stream_shard import split_batch
from hasten.errors import PeerFailedError

# Any in this file: batches are the user's nested values.
_ALIGN: Final = 64
# bytes: (buffer size needed, length of the skeleton), padded to the alignment
_HEADER: Final = 64
_FIRST_ROOM: Final = 1 << 14


class _BatchHole(msgspec.Struct, frozen=True):
    """Placeholder of a tensor in the serialised skeleton."""

    offset: int
    shape: tuple[int, ...]
    dtype: torch.dtype


class BatchWire:
    """Channel that sends one tree per rank from the first member of a group, in one message while sizes do not grow."""

    def __init__(self, comm: Comm) -> None:
        self._comm = comm
        self._room = _FIRST_ROOM
        self._buffers: list[Tensor] = []

    def pack(self, rank_trees: Sequence[Any]) -> list[PackedBatch]:
        """Return the parts in serialised form. Unserialisable values raise here, before other ranks wait for them."""
        return [PackedBatch.of(rank_tree, self._comm.codec) for rank_tree in rank_trees]

    def send(
        self, packed: Sequence[PackedBatch], packed_indices: Sequence[int]
    ) -> None:
        """Send `packed[packed_indices[r]]` to member r. Ranks: the first member only, while the others `receive`.

        The buffer of the first member is not filled for itself alone, as it has its part already.
        """
        need = max(packed_batch.num_bytes for packed_batch in packed)
        if need > self._room:
            notice = self._buffer(0)
            notice[:_HEADER].view(torch.int64)[0] = need
            self._scatter([notice] * self._comm.size)
            self._grow(need)
        filled = []
        for index, packed_batch in enumerate(packed):
            buffer = self._buffer(index)
            if index in packed_indices[1:]:
                packed_batch.write(buffer, need)
            filled.append(buffer)
        self._scatter([filled[where] for where in packed_indices])

    def receive(self) -> Any:
        """Receive the tree that the first member sent."""
        while True:
            buffer = self._scatter(None)
            need, length = buffer[:_HEADER].view(torch.int64)[:2].tolist()
            if need <= self._room:
                return _unpack(buffer, length, self._comm.codec)
            self._grow(need)

    def _scatter(self, buffers: Sequence[Tensor] | None) -> Tensor:
        return self._comm.scatter(buffers, torch.empty(self._room, dtype=torch.uint8))

    def _grow(self, need: int) -> None:
        self._room = -(-need // 4096) * 4096
        self._buffers.clear()

    def _buffer(self, index: int) -> Tensor:
        while len(self._buffers) <= index:
            self._buffers.append(torch.empty(self._room, dtype=torch.uint8))
        return self._buffers[index]


class PackedBatch:
    """A tree in serialised form: the skeleton, and the tensors with their offsets."""

    def __init__(
        self, skeleton: bytes, tensors: list[tuple[_BatchHole, Tensor]], num_bytes: int
    ) -> None:
        self.skeleton = skeleton
        self.tensors = tensors
        self.num_bytes = num_bytes

    @classmethod
    def of(cls, tree: Any, codec: Codec) -> PackedBatch:
        holes_and_tensors: list[tuple[_BatchHole, Tensor]] = []
        offset = 0

        def dig(x: Tensor) -> Any:
            nonlocal offset
            if x.layout != torch.strided or x.is_quantized or type(x) is not Tensor:
                return x  # sent inside the skeleton
            hole = _BatchHole(offset, tuple(x.shape), x.dtype)
            holes_and_tensors.append((hole, x))
            offset += _aligned(x.numel() * x.element_size())
            return hole

        dug = trees.map_tensors(dig, tree)
        skeleton = codec.encode(dug)
        return cls(
            skeleton, holes_and_tensors, _HEADER + _aligned(len(skeleton)) + offset
        )

    def write(self, buffer: Tensor, need: int) -> None:
        length = len(self.skeleton)
        header = buffer[:_HEADER].view(torch.int64)
        header[0], header[1] = need, length
        buffer[_HEADER : _HEADER + length] = torch.frombuffer(
            bytearray(self.skeleton), dtype=torch.uint8
        )
        body = _HEADER + _aligned(length)
        for hole, x in self.tensors:
            _view(buffer, body, hole).copy_(x)


def _unpack(buffer: Tensor, length: int, codec: Codec) -> Any:
    raw = buffer[_HEADER : _HEADER + length].numpy().tobytes()
    body = _HEADER + _aligned(length)
    skeleton = codec.decode(raw)
    return trees.map_leaves(
        lambda leaf: (
            _view(buffer, body, leaf) if isinstance(leaf, _BatchHole) else leaf
        ),
        skeleton,
    )


def _view(buffer: Tensor, body: int, hole: _BatchHole) -> Tensor:
    num_bytes = hole.dtype.itemsize * int(torch.Size(hole.shape).numel())
    first = body + hole.offset
    return buffer[first : first + num_bytes].view(hole.dtype).reshape(hole.shape)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGN) * _ALIGN


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

    def evened(self, even: bool | None) -> DispatchReader:
        """Return the same reader with another `even_batches`, when one is given."""
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
        wire = BatchWire(self._comm)
        return (
            self._send(wire, position) if self._comm.rank == 0 else self._receive(wire)
        )

    # Any: of the inner source
    def reached(self, start: Position, steps: int, source_state: Any) -> Position:
        return self._inner.reached(start, steps * self._reader.per_round, source_state)

    def skipped(self, start: Position, num_batches: int) -> Position:
        return self._inner.skipped(start, num_batches * self._reader.per_round)

    def copied(self, even: bool | None = None) -> DispatchSource:
        return DispatchSource(
            self._inner.copied(even),
            self._reader.evened(even),
            self._comm,
            self._data_ranks,
        )

    def _read_alone(self, position: Position) -> Iterator[Item]:
        for step in self._reader.rounds(self._inner, position):
            yield from (item for item in step.items if item is not None)

    def _send(self, wire: BatchWire, position: Position) -> Iterator[Item]:
        rounds = self._reader.rounds(self._inner, position)
        data_ranks = self._data_ranks
        has_more = True
        while has_more:
            try:
                step = next(rounds, None) or Round(
                    [None] * data_ranks.num_shards, False
                )
                messages = wire.pack(
                    [_RankMessage(item, step.more) for item in step.items]
                )
            # the waiting ranks must learn of any error of the user's dataset
            except Exception as error:
                failed = wire.pack(
                    [_RankMessage(None, False, f"{type(error).__name__}: {error}")]
                )
                wire.send(failed * data_ranks.num_shards, data_ranks.shard_of)
                raise
            wire.send(messages, data_ranks.shard_of)
            has_more = step.more
            own_item = step.items[data_ranks.shard]
            if own_item is not None:
                yield own_item

    def _receive(self, wire: BatchWire) -> Iterator[Item]:
        has_more = True
        while has_more:
            item, has_more, error = wire.receive()
            if error is not None:
                raise PeerFailedError(
                    f"rank {self._comm.ranks[0]}, which reads the data for all ranks, failed with {error}; so this rank has no batch. "
                    "See the traceback of that rank."
                )
            if item is not None:
                yield item


# -- readers: they form each step, from indices cut beforehand or from whole batches -------------------------------------
SliceFn = Callable[..., Any]
"""`slice_fn(batch, slice, process_index, num_processes)` returns that process's rows of a global batch."""


class IndexedReader:
    """Reader of map-style data: the indices are cut for every rank first, so each share is collated separately."""

    per_round = 1

    def evened(self, even: bool | None) -> IndexedReader:
        return self

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

    def evened(self, even: bool | None) -> StreamReader:
        return self

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


@dataclass(frozen=True, slots=True)
class BatchReader:
    """Reader of whole batches for every rank: one batch per rank, or each batch split by rows."""

    num_shards: int
    split: bool
    even: bool
    drop_last: bool
    slice_fn: SliceFn | None = None

    def evened(self, even: bool | None) -> BatchReader:
        return self if even is None else replace(self, even=even)

    @property
    def per_round(self) -> int:
        return 1 if self.split else self.num_shards

    def steps(self, source: BatchSource) -> int | None:
        batches = source.steps()
        if batches is None:
            return None
        full, tail = divmod(batches, self.per_round)
        return full + int(tail > 0 and not self.drop_last)

    def rounds(self, source: BatchSource, position: Position) -> Iterator[Round]:
        pads = (
            self.even
            and self.num_shards > 1
            and not (self.split and self.slice_fn is None)
        )
        first: Any = source.first(position) if pads and position.consumed else None
        items = source.open(position)
        for group, following in with_next(self._groups(items)):
            if first is None:
                first = trees.map_leaves(own_copy, group[0][0])
            rank_batches = self._parts(group, first)
            num_next = (
                self.num_shards
                if following and (self.even or self.split)
                else len(following or ())
            )
            state = group[-1][3]
            items_of_ranks: list[Item | None] = [
                (*rank_batch, shard >= num_next, state)
                for shard, rank_batch in enumerate(rank_batches)
            ]
            yield Round(
                items_of_ranks + [None] * (self.num_shards - len(items_of_ranks)),
                following is not None,
            )

    def _parts(self, group: list[Item], first: Any) -> list[tuple[Any, Padding | None]]:
        """Return batch and padding for each rank that has a share of the step."""
        if self.slice_fn is not None:
            return self._sliced(group, first)
        if self.split:
            shards = range(self.num_shards)
            batch, padding = group[0][:2]
            return [
                split_batch(batch, self.num_shards, shard, self.even, padding)
                for shard in shards
            ]
        rank_batches: list[tuple[Any, Padding | None]] = [
            (item[0], item[1]) for item in group
        ]
        if self.even:
            rank_batches += [(first, Padding(0, None))] * (
                self.num_shards - len(rank_batches)
            )
        return rank_batches

    def _groups(self, items: Iterator[Item]) -> Iterator[list[Item]]:
        while group := list(islice(items, self.per_round)):
            if len(group) == self.per_round or not self.drop_last:
                yield group

    def _sliced(
        self, group: list[Item], first: Any
    ) -> list[tuple[Any, Padding | None]]:
        assert self.slice_fn is not None, "only called with a slice function"
        global_batch = trees.concat([item[0] for item in group])
        size = trees.batch_size(global_batch) or 0
        shares = [
            cut(size, self.num_shards, shard, self.even)
            for shard in range(self.num_shards)
        ]
        missing = shares[-1].first + shares[-1].rows - size
        have = trees.batch_size(first) or 1
        while missing > 0:  # the epoch's first batch may have fewer rows
            global_batch = trees.concat(
                [global_batch, trees.slice_rows(first, slice(0, min(missing, have)))]
            )
            missing -= have
        padded = sum(
            item[1].rows - item[1].real
            for item in group
            if item[1] is not None and item[1].rows is not None
        )
        reals = [
            min(share.real, max(size - padded - share.first, 0)) for share in shares
        ]
        return [
            (
                self.slice_fn(
                    global_batch,
                    slice(share.first, share.first + share.rows),
                    shard,
                    self.num_shards,
                ),
                None if real == share.rows else Padding(real, share.rows),
            )
            for shard, (share, real) in enumerate(zip(shares, reals, strict=True))
        ]
