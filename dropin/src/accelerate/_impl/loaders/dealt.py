"""The main process's batches, dealt out to all processes step by step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

from accelerate._impl.tensors import find_batch_size
from hasten import trees
from hasten.data.batch_plan import split_units
from hasten.data.dispatch import Round
from hasten.data.position import Position
from hasten.data.prefetch import with_next
from hasten.data.source import BatchSource, Item

# Any in this file: batches are the user's nested values.


@dataclass(frozen=True, slots=True)
class Dealt:
    """The main process's batches, one for each process; those of a step that differ in size are joined and cut again."""

    num_shards: int
    split: bool
    even: bool
    drop_last: bool
    slice_fn: Callable[..., Any]
    joins: bool = False
    """Whether those of every step are."""

    @property
    def per_round(self) -> int:
        return 1 if self.split else self.num_shards

    def steps(self, source: BatchSource) -> int | None:
        batches = source.steps()
        if batches is None:
            return None
        full, tail = divmod(batches, self.per_round)
        return full + int(tail > 0 and not self.drop_last)

    # Any: a source that has read the first batch of the epoch
    def rounds(self, source: Any, position: Position) -> Iterator[Round]:
        """Yield the steps, marked with the samples that their batches hold together."""
        pads = self.even and self.num_shards > 1
        if pads and position.consumed:
            first = source.first(position)
        else:
            first = None
        items = source.open(position)
        for group, following in with_next(self._groups(items)):
            if first is None:
                first = trees.map_tensors(lambda x: x.clone(), group[0][0])
            num_next = len(following or ())
            if following and (self.even or self.split):
                num_next = self.num_shards
            total = sum(find_batch_size(item[0]) or 0 for item in group)
            rank_batches = enumerate(self._parts(group, first))
            rank_items: list[Item | None] = []
            for shard, batch in rank_batches:
                rank_items.append((batch, None, shard >= num_next, total))
            yield Round(rank_items, following is not None)

    def _groups(self, items: Iterator[Item]) -> Iterator[list[Item]]:
        while group := list(islice(items, self.per_round)):
            if len(group) == self.per_round or not self.drop_last:
                yield group

    def _parts(self, group: list[Item], first: Any) -> list[Any]:
        batches = [item[0] for item in group]
        sizes = set(map(find_batch_size, batches))
        if self.joins or self.split or len(group) < self.num_shards or len(sizes) > 1:
            return self._sliced(batches, first)
        return batches

    def _sliced(self, batches: list[Any], first: Any) -> list[Any]:
        """Return each process's rows of the batches together, filled with those of the epoch's first batch."""
        global_batch = trees.concat(batches)
        batch_size = trees.batch_size(global_batch) or 0
        shares = []
        for shard in range(self.num_shards):
            shares.append(split_units(batch_size, self.num_shards, shard, self.even))
        num_missing = shares[-1].first + shares[-1].rows - batch_size
        num_first = trees.batch_size(first) or 1
        while num_missing > 0:  # the epoch's first batch may have fewer rows
            filling = trees.slice_rows(first, slice(0, min(num_missing, num_first)))
            global_batch = trees.concat([global_batch, filling])
            num_missing -= num_first
        shard_batches = []
        for shard, share in enumerate(shares):
            shard_batches.append(
                self.slice_fn(
                    global_batch,
                    slice(share.first, share.first + share.rows),
                    shard,
                    self.num_shards,
                )
            )
        return shard_batches
