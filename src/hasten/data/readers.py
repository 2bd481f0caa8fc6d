"""Readers of a dispatching loader, which form each step: from indices cut beforehand, or from whole batches."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import chain, islice
from typing import Any

from torch import Tensor

from hasten import trees
from hasten.data.batch_plan import Padding, cut
from hasten.data.dispatch import Round
from hasten.data.iterable import split_batch
from hasten.data.position import Position
from hasten.data.prefetch import with_next
from hasten.data.sampler import Lot
from hasten.data.source import BatchSource, IndexedSource, Item

# Any in this file: batches are objects of the user.
SliceFn = Callable[..., Any]
"""`slice_fn(batch, slice, process_index, num_processes)` returns that process's rows of a global batch."""


class IndexedReader:
    """Reader of map-style data: the indices are cut for every rank first, so each share is collated separately."""

    per_round = 1

    def evened(self, even: bool | None) -> IndexedReader:
        return self

    def steps(self, source: BatchSource) -> int | None:
        return source.steps()

    def rounds(self, source: BatchSource, at: Position) -> Iterator[Round]:
        assert isinstance(source, IndexedSource), "indices are cut for indexed data only"
        lots = with_next(source.assignment.rounds(at))
        plans: deque[tuple[list[Lot | None], bool]] = deque()

        def flat() -> Iterator[Lot]:
            for step, following in lots:
                plans.append((step, following is not None))
                yield from (lot for lot in step if lot is not None)

        items = source.read(flat(), at)
        for first in items:
            step, more = plans.popleft()
            rest = islice(items, sum(lot is not None for lot in step) - 1)
            read = chain([first], rest)
            yield Round([None if lot is None else next(read) for lot in step], more)


class StreamReader:
    """Reader of streams: the elements of a round are cut for every rank before they are collated."""

    per_round = 1

    def evened(self, even: bool | None) -> StreamReader:
        return self

    def steps(self, source: BatchSource) -> int | None:
        return source.steps()

    def rounds(self, source: BatchSource, at: Position) -> Iterator[Round]:
        for (parts, _, _, mark), following in with_next(source.open(at)):
            left = [None] * len(parts) if following is None else following[0]
            items = [
                None if part is None else (*part, later is None, mark) for part, later in zip(parts, left, strict=True)
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

    def rounds(self, source: BatchSource, at: Position) -> Iterator[Round]:
        pads = self.even and self.num_shards > 1 and not (self.split and self.slice_fn is None)
        first: Any = source.first(at) if pads and at.consumed else None
        items = source.open(at)
        for group, following in with_next(self._groups(items)):
            if first is None:
                first = trees.map_leaves(_own_copy, group[0][0])
            parts = self._parts(group, first)
            go_on = self.num_shards if following and (self.even or self.split) else len(following or ())
            mark = group[-1][3]
            dealt: list[Item | None] = [(*part, shard >= go_on, mark) for shard, part in enumerate(parts)]
            yield Round(dealt + [None] * (self.num_shards - len(dealt)), following is not None)

    def _parts(self, group: list[Item], first: Any) -> list[tuple[Any, Padding | None]]:
        """Return batch and padding for each rank that has a share of the step."""
        if self.slice_fn is not None:
            return self._sliced(group, first)
        if self.split:
            shards = range(self.num_shards)
            batch, padding = group[0][:2]
            return [split_batch(batch, self.num_shards, shard, self.even, padding) for shard in shards]
        parts: list[tuple[Any, Padding | None]] = [(item[0], item[1]) for item in group]
        if self.even:
            parts += [(first, Padding(0, None))] * (self.num_shards - len(parts))
        return parts

    def _groups(self, items: Iterator[Item]) -> Iterator[list[Item]]:
        while group := list(islice(items, self.per_round)):
            if len(group) == self.per_round or not self.drop_last:
                yield group

    def _sliced(self, group: list[Item], first: Any) -> list[tuple[Any, Padding | None]]:
        assert self.slice_fn is not None, "only called with a slice function"
        whole = trees.concat([item[0] for item in group])
        size = trees.batch_size(whole) or 0
        shares = [cut(size, self.num_shards, shard, self.even) for shard in range(self.num_shards)]
        missing = shares[-1].first + shares[-1].rows - size
        have = trees.batch_size(first) or 1
        while missing > 0:  # the epoch's first batch may have fewer rows
            whole = trees.concat([whole, trees.slice_rows(first, slice(0, min(missing, have)))])
            missing -= have
        padded = sum(item[1].rows - item[1].real for item in group if item[1] is not None and item[1].rows is not None)
        reals = [min(share.real, max(size - padded - share.first, 0)) for share in shares]
        return [
            (
                self.slice_fn(whole, slice(share.first, share.first + share.rows), shard, self.num_shards),
                None if real == share.rows else Padding(real, share.rows),
            )
            for shard, (share, real) in enumerate(zip(shares, reals, strict=True))
        ]


def _own_copy(leaf: Any) -> Any:
    """Return a clone of a tensor, so that users may change it in place; other leaves are returned unchanged."""
    return leaf.clone() if isinstance(leaf, Tensor) else leaf
