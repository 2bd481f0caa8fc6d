"""Streams, cut in the process that reads them: each (rank, worker) keeps its own blocks of an IterableDataset."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any, Literal, NamedTuple

import torch
from torch.utils.data import IterableDataset, get_worker_info

from hasten import trees
from hasten.data.plan import cut
from hasten.data.workers import Forwarding

# Any in this file: samples, batches and dataset states are the user's own objects.
Sharing = Literal["strided", "own", "asked"]
"""strided: every rank reads the stream and keeps its blocks. own: the dataset is this rank's part already. asked: the
dataset gives the part of each (rank, worker) through its `shard(num_shards=, index=)`."""


class Block(NamedTuple):
    """The samples of one batch, before they are collated, and where the worker's stream stands after its round."""

    samples: Any
    real: int | None
    worker: int
    position: int
    state: Any
    blank: bool = False
    """No batch at all: it keeps the turn of a worker that had its turn before the run was resumed."""


@dataclass(frozen=True, slots=True)
class Cutting:
    """How a stream is cut into blocks."""

    num_shards: int
    shard: int
    rows: int
    """Elements of one block: one rank's batch."""
    batched: bool
    """False when elements are batches already (batch_size=None)."""
    drop_last: bool
    even: bool
    sharing: Sharing = "strided"
    split: tuple[int, int] | None = None
    """(number of shares, share) when each element is a batch whose rows are split over the ranks."""


@dataclass(frozen=True, slots=True)
class Start:
    """Where the workers begin, and for which opening of the loader that holds."""

    serial: int
    positions: tuple[int, ...] = ()
    states: tuple[Any, ...] = ()
    turn: int = 0


class StreamShard(Forwarding, IterableDataset[Block]):
    """This rank's blocks of a stream, whole rounds at a time, so that positions mean the same on every rank."""

    def __init__(self, dataset: Any, cutting: Cutting, num_workers: int) -> None:
        self.hasten_cutting = cutting
        self.hasten_start = Start(serial=0)
        # (epoch, serial of the opening): read by workers, also by those that live on from epoch to epoch
        self.hasten_control = torch.zeros(2, dtype=torch.int64)
        if num_workers:
            self.hasten_control.share_memory_()  # type: ignore[no-untyped-call]
        self.hasten_dataset = dataset

    def __iter__(self) -> Iterator[Block]:
        info = get_worker_info()
        worker, num_workers = (0, 1) if info is None else (info.id, info.num_workers)
        epoch, serial = self.hasten_control.tolist()
        if info is not None:
            set_epoch = getattr(self.hasten_dataset, "set_epoch", None)
            if callable(set_epoch):
                set_epoch(epoch)
        start = self.hasten_start if self.hasten_start.serial == serial else Start(serial)
        stream = _part_of(self.hasten_dataset, self.hasten_cutting, worker, num_workers)
        return _from(start, stream, self.hasten_cutting, worker)  # what holds now, whenever a block is asked for


def _part_of(dataset: Any, cutting: Cutting, worker: int, num_workers: int) -> Any:
    """The stream one worker reads."""
    if cutting.sharing != "asked":
        return dataset
    index = cutting.shard * num_workers + worker
    return dataset.shard(num_shards=cutting.num_shards * num_workers, index=index)


def _from(start: Start, stream: Any, cutting: Cutting, worker: int) -> Iterator[Block]:
    if worker < start.turn:
        yield Block(None, None, worker, start.positions[worker], None, blank=True)
    position = start.positions[worker] if start.positions else 0
    state = start.states[worker] if start.states else None
    yield from _blocks(stream, cutting, worker, position, state)


def _blocks(stream: Any, cutting: Cutting, worker: int, position: int, state: Any) -> Iterator[Block]:
    """This rank's blocks of one worker's stream, from a position on."""
    strided = cutting.sharing == "strided"
    num_shards, shard = (cutting.num_shards, cutting.shard) if strided else (1, 0)
    pads = cutting.even and cutting.num_shards > 1
    elements = iter(stream)
    head: list[Any] = []
    if position:
        head = list(islice(elements, min(cutting.rows, position))) if pads or state is None else []
        if state is None:
            _skip(elements, position - len(head))
        else:
            stream.load_state_dict(state)
            elements = iter(stream)
    remembers = hasattr(stream, "state_dict") and hasattr(stream, "load_state_dict")
    while True:
        first, mine, taken = _round(elements, cutting.rows, num_shards, shard)
        if pads and not head:
            head = list(first)
        full = taken == cutting.rows * num_shards
        if not taken or (not full and cutting.drop_last):
            return
        position += taken
        real = len(mine)
        if pads and not full:
            rows = cutting.rows if not strided else min(cutting.rows, taken)
            mine.extend(head[place % len(head)] for place in range(rows - real))
        if mine:
            samples = mine if cutting.batched else mine[0]
            told = stream.state_dict() if remembers else None
            yield Block(samples, None if real == len(mine) else real, worker, position, told)
        if not full:
            return


class BlockCollate:
    """The user's collate_fn, applied to a block's samples; what else the block says goes along."""

    def __init__(self, collate_fn: Callable[[Any], Any], cutting: Cutting) -> None:
        self.collate_fn = collate_fn
        self.cutting = cutting

    def __call__(self, block: Block) -> tuple[Any, ...]:
        if block.blank:
            return tuple(block)
        batch, real = self.collate_fn(block.samples), block.real
        if self.cutting.split is not None:
            batch, real = split_batch(batch, *self.cutting.split, even=self.cutting.even)
        return (batch, real, *block[2:])


def split_batch(batch: Any, num_shards: int, shard: int, even: bool) -> tuple[Any, int | None]:
    """One rank's rows of a batch, and how many of them are real (None for all)."""
    size = trees.batch_size(batch)
    if size is None:
        return batch, None
    share = cut(size, num_shards, shard, even)
    if share.first + share.rows <= size:
        return trees.slice_rows(batch, slice(share.first, share.first + share.rows), size), None
    places = torch.arange(share.first, share.first + share.rows) % size
    rows = trees.map_tensors(lambda x: x[places.to(x.device)] if x.ndim and x.shape[0] == size else x, batch)
    return rows, share.real


def _round(elements: Iterator[Any], rows: int, num_shards: int, shard: int) -> tuple[list[Any], list[Any], int]:
    """One round of the stream: its first elements, this rank's block, and how many elements it had in all."""
    first = list(islice(elements, rows if shard else 0))
    passed = len(first) + _skip(elements, shard * rows - len(first))
    mine = list(islice(elements, rows))
    after = _skip(elements, (num_shards - shard - 1) * rows)
    return first or mine, mine, passed + len(mine) + after


def _skip(elements: Iterator[Any], count: int) -> int:
    """Read past up to `count` elements; how many there were."""
    passed = 0
    for _ in islice(elements, max(count, 0)):
        passed += 1
    return passed


def is_hub_stream(dataset: object) -> bool:
    """Whether the dataset is an IterableDataset of Hugging Face `datasets`."""
    return any(
        (base.__module__, base.__name__) == ("datasets.iterable_dataset", "IterableDataset")
        for base in type(dataset).__mro__
    )
