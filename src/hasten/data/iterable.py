"""Streams, cut in the process that reads them: each (rank, worker) keeps its own blocks of an IterableDataset."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any, Literal, NamedTuple

import torch
from torch.utils.data import IterableDataset, get_worker_info

from hasten import trees
from hasten.config.data import Pad
from hasten.data.foreign import begin_anew, is_hub_stream, own_epoch, state_loses_samples
from hasten.data.memory import Memory
from hasten.data.own_rng import OwnRng, RandomStates, States
from hasten.data.plan import Padding, cut
from hasten.data.shuffle import derive_seed
from hasten.data.workers import Forwarding

# Any in this file: samples, batches and dataset states are the user's own objects.
Sharing = Literal["strided", "own", "asked"]
"""strided: every rank reads the stream and keeps its blocks. own: the dataset is this rank's part already. asked: the
dataset gives the part of each (rank, worker) through its `shard(num_shards=, index=)`."""


class Stand(NamedTuple):
    """Where one worker's stream stands."""

    position: int = 0
    """Elements read since the epoch began."""
    state: Any = None
    """The stream's own state there, when it may be trusted; without one, the stream is read again up to the position."""
    rng: States | None = None
    """The reading's random states there, when there is a state and anything was drawn."""
    origin: Any = None
    """What the dataset remembered when the epoch began (see Memory)."""


class Block(NamedTuple):
    """The samples of one batch, before they are collated, and where the worker's stream stands after its round."""

    samples: Any
    real: int | None
    worker: int
    stand: Stand
    seed: int = 0
    """What the collate function's random draws begin from."""
    blank: Literal["", "begin", "turn", "end"] = ""
    """No batch at all. begin: what the dataset of a worker remembers as the epoch begins. turn: it keeps the turn of a worker that had its turn before the run was resumed. end: the
    worker's stream has ended, and this is what its dataset remembers."""


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
    pad: Pad = "least"

    @property
    def pads(self) -> bool:
        """Whether the last block of an epoch may be lengthened by the epoch's first elements."""
        return self.even and (self.num_shards > 1 or (self.pad == "full" and self.batched))


@dataclass(frozen=True, slots=True)
class Start:
    """Where the workers begin, and for which opening of the loader that holds."""

    serial: int
    stands: tuple[Stand, ...] = ()
    turn: int = 0


class StreamShard(Forwarding, IterableDataset[Block]):
    """This rank's blocks of a stream, whole rounds at a time, so that positions mean the same on every rank."""

    def __init__(self, dataset: Any, cutting: Cutting, num_workers: int, process: RandomStates) -> None:
        self.hasten_cutting = cutting
        self.hasten_start = Start(serial=0)
        self.hasten_process = process
        # (epoch, serial of the opening, seed): read by workers, also by those that live on from epoch to epoch
        self.hasten_control = torch.zeros(3, dtype=torch.int64)
        if num_workers:
            self.hasten_control.share_memory_()  # type: ignore[no-untyped-call]
        self.hasten_dataset = dataset
        self.hasten_memory = Memory(dataset, attributes=not is_hub_stream(dataset))

    def __iter__(self) -> Iterator[Block]:
        info = get_worker_info()
        worker, num_workers = (0, 1) if info is None else (info.id, info.num_workers)
        epoch, serial, seed = self.hasten_control.tolist()
        dataset, cutting, memory = self.hasten_dataset, self.hasten_cutting, self.hasten_memory
        if info is not None:
            set_epoch = getattr(dataset, "set_epoch", None)
            if callable(set_epoch):
                own_epoch(dataset)
                set_epoch(epoch)
        start = self.hasten_start if self.hasten_start.serial == serial else Start(serial)
        stand = start.stands[worker] if start.stands else Stand()
        if stand.origin is not None or stand.position:  # no origin: nothing had changed since prepare
            memory.restore(stand.origin)
        stand = stand._replace(origin=memory.capture())
        # Every rank that reads the same elements draws the same numbers.
        place = (seed, epoch, worker) if cutting.sharing == "strided" else (seed, epoch, worker, cutting.shard)
        rng = OwnRng(derive_seed(*place, 3), self.hasten_process)
        begin_anew(dataset)
        with rng.entered():
            stream = _part_of(dataset, cutting, worker, num_workers)
        seeds = (seed, epoch, cutting.shard, worker)
        cutter = _Cutter(stream, cutting, worker, rng, seeds)
        end = memory if info is not None else None  # in one process, the dataset itself can be asked
        return cutter.blocks(stand, worker < start.turn, end)  # what holds now, whenever a block is asked for


def _part_of(dataset: Any, cutting: Cutting, worker: int, num_workers: int) -> Any:
    """The stream one worker reads."""
    if cutting.sharing != "asked":
        return dataset
    index = cutting.shard * num_workers + worker
    return dataset.shard(num_shards=cutting.num_shards * num_workers, index=index)


class _Cutter:
    """Cuts one worker's stream into this rank's blocks, drawing from random states of its own."""

    def __init__(self, stream: Any, cutting: Cutting, worker: int, rng: OwnRng, seeds: tuple[int, ...]) -> None:
        self._stream = stream
        self._cutting = cutting
        self._worker = worker
        self._rng = rng
        self._seeds = seeds
        strided = cutting.sharing == "strided"
        self._num_shards, self._shard = (cutting.num_shards, cutting.shard) if strided else (1, 0)
        self._pads = cutting.pads
        has_state = hasattr(stream, "state_dict") and hasattr(stream, "load_state_dict")
        self._trusted = has_state and not state_loses_samples(stream, in_worker=get_worker_info() is not None)
        # The state of a stream of `datasets` holds its generators. Of others it is unknown, and those that draw are
        # read again up to the position instead.
        self._watched = Memory(stream, attributes=False) if self._trusted and not is_hub_stream(stream) else None
        self._drawn_from = None if self._watched is None else self._watched.capture()

    def blocks(self, stand: Stand, had_turn: bool, end: Memory | None) -> Iterator[Block]:
        """The blocks from a stand on; a worker first says where it stands, before any of them is handed to the user."""
        if end is not None:
            yield Block(None, None, self._worker, stand, blank="begin")
        if had_turn:
            yield Block(None, None, self._worker, stand, blank="turn")
        with self._rng.entered():
            head, elements = self._seek(stand)
        if stand.state is not None:
            self._rng.place(stand.rng)
        cutting, position = self._cutting, stand.position
        while True:
            with self._rng.entered():
                first, mine, taken = _round(elements, cutting.rows, self._num_shards, self._shard)
                head = head or (list(first) if self._pads else [])
                full = taken == cutting.rows * self._num_shards
            if not taken or (not full and cutting.drop_last):
                break
            # After its end a stream's state may mean the beginning of the next epoch: then the position is read up to.
            state = self._state() if full else None
            position += taken
            real = len(mine)
            if self._pads and not full:
                spread = cutting.sharing == "strided" and cutting.pad == "least"
                rows = min(cutting.rows, taken) if spread else cutting.rows
                mine.extend(head[place % len(head)] for place in range(rows - real))
            if mine:
                samples = mine if cutting.batched else mine[0]
                rng = self._rng.state() if state is not None else None
                here = Stand(position, state, rng, stand.origin)
                seed = derive_seed(*self._seeds, position, 4)
                yield Block(samples, None if real == len(mine) else real, self._worker, here, seed)
            if not full:
                break
        memory = None if end is None else end.capture()
        if memory is not None:
            yield Block(None, None, self._worker, Stand(position, origin=memory), blank="end")

    def _seek(self, stand: Stand) -> tuple[list[Any], Iterator[Any]]:
        """The epoch's first elements, where padding may need them, and the stream from the stand on."""
        stream = self._stream
        elements = iter(stream)
        if not stand.position:
            return [], elements
        head: list[Any] = []
        if self._pads or stand.state is None:
            head = list(islice(elements, min(self._cutting.rows, stand.position)))
        if stand.state is None:
            _skip(elements, stand.position - len(head))
            return head, elements
        stream.load_state_dict(stand.state)
        return head, iter(stream)

    def _state(self) -> Any:
        """The stream's own state, if it is all that going on from here takes."""
        if not self._trusted:
            return None
        if self._watched is None:
            return self._stream.state_dict()
        if self._rng.state() is not None or self._watched.generators_changed(self._drawn_from):
            self._trusted = False
            return None
        return copy.deepcopy(self._stream.state_dict())


class BlockCollate:
    """The user's collate_fn, applied to a block's samples; what else the block says goes along."""

    def __init__(self, collate_fn: Callable[[Any], Any], cutting: Cutting, process: RandomStates) -> None:
        self.collate_fn = collate_fn
        self.cutting = cutting
        self.process = process

    def __call__(self, block: Block) -> tuple[Any, Padding | None, int, Stand, str]:
        """(batch, padding, worker, stand, kind of blank)."""
        if block.blank:
            return None, None, block.worker, block.stand, block.blank
        self.process.seed(block.seed)
        batch = self.collate_fn(block.samples)
        rows = len(block.samples) if self.cutting.batched else None
        padding = None if block.real is None else Padding(block.real, rows)
        if self.cutting.split is not None:
            batch, padding = split_batch(batch, *self.cutting.split, even=self.cutting.even)
        return batch, padding, block.worker, block.stand, block.blank


def split_batch(
    batch: Any, num_shards: int, shard: int, even: bool, padding: Padding | None = None
) -> tuple[Any, Padding | None]:
    """One rank's rows of a batch that may be padded, and its padding (None for none)."""
    size = trees.batch_size(batch)
    if size is None:
        return batch, padding
    share = cut(size, num_shards, shard, even)
    if share.first + share.rows <= size:
        real = share.rows if padding is None else min(max(padding.real - share.first, 0), share.rows)
        rows = trees.slice_rows(batch, slice(share.first, share.first + share.rows), size)
        return rows, None if real == share.rows else Padding(real, share.rows)
    places = torch.arange(share.first, share.first + share.rows) % size
    wrapped = trees.map_tensors(lambda x: x[places.to(x.device)] if x.ndim and x.shape[0] == size else x, batch)
    real = share.real if padding is None else min(max(padding.real - share.first, 0), share.real)
    return wrapped, Padding(real, share.rows)


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
