"""The source that reads streams on every rank, looks one batch ahead, and ends where all ranks agree to end."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sized
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader

from hasten import trees
from hasten.comm.base import Comm
from hasten.data.iterable import BlockCollate, Cutting, Start, StreamShard
from hasten.data.position import Position, Unit
from hasten.data.source import Item, engine_of
from hasten.errors import DataError

# Any in this file: batches and dataset states are the user's own objects.


class Mark(NamedTuple):
    """Where every worker's stream stands after a batch."""

    positions: tuple[int, ...]
    states: tuple[Any, ...]
    turn: int
    """The worker whose batch comes next."""


class StreamSource:
    """An IterableDataset, read on this rank through a DataLoader whose workers keep this rank's blocks."""

    unit: Unit = "stream"

    def __init__(self, loader: DataLoader[Any], cutting: Cutting, dataset: Any, comm: Comm, rank: int) -> None:
        self._loader = loader
        self._cutting = cutting
        self._dataset = dataset
        self._comm = comm
        self._rank = rank
        self._num_workers = max(loader.num_workers, 1)
        self._shard = StreamShard(dataset, cutting, loader.num_workers)
        self.engine = engine_of(
            loader,
            dataset=self._shard,
            batch_size=None,
            batch_sampler=None,
            drop_last=False,
            collate_fn=BlockCollate(loader.collate_fn, cutting),
        )

    def size(self) -> int | None:
        """The stream's length where its end can be computed: one reader, the same stream on all ranks."""
        known = self._cutting.sharing == "strided" and self._num_workers == 1 and isinstance(self._dataset, Sized)
        return len(self._dataset) if known else None

    def steps(self) -> int | None:
        size, cutting = self.size(), self._cutting
        if size is None:
            return None
        full, tail = divmod(size, cutting.rows * cutting.num_shards)
        served = tail > 0 and not cutting.drop_last and (cutting.even or tail > cutting.shard * cutting.rows)
        return full + int(served)

    def begin(self, at: Position) -> Position:
        return at

    def open(self, at: Position) -> Iterator[Item]:
        mark = self._mark_of(at)
        shard = self._shard
        serial = shard.hasten_start.serial + 1
        shard.hasten_control[0], shard.hasten_control[1] = at.epoch, serial
        shard.hasten_start = Start(serial, *mark)
        if at.stream is not None:  # workers that live on from an earlier epoch do not see the new start
            self.engine.__dict__["_iterator"] = None
        items = self._read(iter(self.engine), mark, at)
        if self._comm.size > 1 and self._cutting.even and self.size() is None:
            return agreed(items, self._comm, self._cutting.drop_last)
        return looking_ahead(items)

    def reached(self, start: Position, steps: int, mark: Mark) -> Position:
        stream = {"workers": self._num_workers, "positions": list(mark.positions), "turn": mark.turn}
        if any(state is not None for state in mark.states):
            stream["states"] = list(mark.states)
        if self._cutting.sharing != "strided":
            stream["shards"] = self._cutting.num_shards
        return replace(start, consumed=sum(mark.positions), stream=stream)

    def skipped(self, start: Position, num_batches: int) -> Position:
        rounds, more = divmod(num_batches, self._num_workers)
        size = self._cutting.rows * (self._cutting.num_shards if self._cutting.sharing == "strided" else 1)
        positions = tuple((rounds + (worker < more)) * size for worker in range(self._num_workers))
        return self.reached(start, num_batches, Mark(positions, (None,) * self._num_workers, more))

    def change(self, name: str, value: Any) -> None:
        setattr(self.engine, name, BlockCollate(value, self._cutting) if name == "collate_fn" else value)

    def copied(self, even: bool | None = None) -> StreamSource:
        cutting = self._cutting if even is None else replace(self._cutting, even=even)
        return StreamSource(self._loader, cutting, self._dataset, self._comm, self._rank)

    def _mark_of(self, at: Position) -> Mark:
        if at.stream is None:
            return Mark((0,) * self._num_workers, (None,) * self._num_workers, 0)
        saved, stream = at.stream["workers"], at.stream
        if saved != self._num_workers:
            raise DataError(
                f"the stream's position was saved with {saved} reading worker(s), and this loader has "
                f"{self._num_workers}; each worker reads a part of its own, so samples would be lost or repeated. "
                f"Set num_workers={saved}."
            )
        shards = stream.get("shards", self._cutting.num_shards)
        own = self._cutting.sharing != "strided"
        if shards != self._cutting.num_shards or ("shards" in stream) != own:
            raise DataError(
                f"the stream's position was saved with the dataset's shards dealt out to {shards} rank(s), and there "
                f"are {self._cutting.num_shards} now; a rank's part is another one, so samples would be lost or "
                f"repeated. Resume on {shards} data-parallel processes, or use dispatch_batches=True from the start."
            )
        states = tuple(stream.get("states", (None,) * saved))
        return Mark(tuple(stream["positions"]), states, stream["turn"])

    def _read(self, blocks: Iterator[Any], mark: Mark, at: Position) -> Iterator[Item]:
        positions, states = list(mark.positions), list(mark.states)
        number = 0
        while True:
            try:
                block = next(blocks)
            except StopIteration:
                return
            except Exception as error:  # the user's dataset or a worker: any type, raised on as it is
                error.add_note(
                    f"hasten: reading the stream failed on rank {self._rank}, epoch {at.epoch}, batch {number} after "
                    f"element {at.consumed}."
                )
                raise
            batch, real, worker, position, state, blank = block
            if blank:
                continue
            positions[worker], states[worker] = position, state
            number += 1
            turn = (worker + 1) % self._num_workers
            yield batch, real, False, Mark(tuple(positions), tuple(states), turn)


def looking_ahead(items: Iterator[Item]) -> Iterator[Item]:
    """The same items, the last one marked as such."""
    ahead = next(items, None)
    while ahead is not None:
        item, ahead = ahead, next(items, None)
        yield item if ahead is not None else ended(item)


def agreed(items: Iterator[Item], comm: Comm, drop_last: bool) -> Iterator[Item]:
    """The same items on a step count that all ranks share: one small exchange a step, before the batch is handed out.

    A rank that runs out early repeats its first batch as padding until the others are done, or with `drop_last` all
    end with the first that does.

    Raises: DataError on every rank when some rank has nothing at all.
    """
    item = next(items, None)
    first = None if item is None else trees.map_leaves(lambda leaf: leaf, item[0])  # users take their batches apart
    mark = None
    share_ends = _exchange(comm)
    more = _go_on(share_ends(item is not None, item is None), comm, drop_last)
    while more:
        batch, real, _, mark = (first, 0, False, mark) if item is None else item
        item = next(items, None)
        more = _go_on(share_ends(item is not None, False), comm, drop_last)
        yield batch, real, not more, mark


def _exchange(comm: Comm) -> Callable[[bool, bool], list[int]]:
    def share(has_batch: bool, is_empty: bool) -> list[int]:
        mine = torch.tensor([2 if has_batch else 0 if is_empty else 1], dtype=torch.int64)
        told: list[int] = comm.all_gather(mine).flatten().tolist()
        return told

    return share


def _go_on(told: list[int], comm: Comm, drop_last: bool) -> bool:
    empty = [comm.ranks[member] for member, said in enumerate(told) if said == 0]
    if empty and len(empty) < len(told) and not drop_last:
        raise DataError(
            f"the stream gave no sample to rank(s) {', '.join(map(str, empty))} of {len(told)}, so they could not take "
            f"a step with the others. Give the dataset at least {len(told)} shards, or samples for every rank; "
            f"drop_last=True ends the epoch where the shortest rank does, even_batches=False lets each rank end alone."
        )
    return all(said == 2 for said in told) if drop_last else any(said == 2 for said in told)


def ended(item: Item) -> Item:
    """The item, marked as the epoch's last."""
    batch, real, _, mark = item
    return batch, real, True, mark
