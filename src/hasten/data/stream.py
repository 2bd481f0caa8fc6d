"""Source of streams on every rank: looks one batch ahead, and ends on a step that all ranks agree on."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, Final

import torch
from torch.utils.data import DataLoader

from hasten import trees
from hasten.comm.base import Comm
from hasten.data.batch_plan import Padding, derive_seed
from hasten.data.foreign import has_fixed_shard_order, length_of, shares_epochs
from hasten.data.position import Position, Unit
from hasten.data.random_states import RandomStates, decode_states, encode_states
from hasten.data.source import Item, engine_of, own_copy
from hasten.data.stream_shard import (
    BlockCollate,
    Cutting,
    StreamShard,
    StreamState,
    WorkerState,
)
from hasten.errors import DataError, PeerFailedError

# Any in this file: batches and dataset states are objects of the user.
_EMPTY: Final = 0
_ENDED: Final = 1
_MORE: Final = 2
_FAILED: Final = 3


class StreamSource:
    """Source of an IterableDataset, read on this rank through a DataLoader whose workers select this rank's blocks."""

    unit: Unit = "stream"

    def __init__(
        self,
        loader: DataLoader[Any],
        cutting: Cutting,
        dataset: Any,
        comm: Comm,
        rank: int,
    ) -> None:
        self._loader = loader
        self._cutting = cutting
        self._dataset = dataset
        self._comm = comm
        self._rank = rank
        self._num_workers = max(loader.num_workers, 1)
        self._process = RandomStates()
        self._shard = StreamShard(dataset, cutting, loader.num_workers, self._process)
        fixed = has_fixed_shard_order(loader.dataset)
        self._made_with = self._shard.hasten_carried.capture() if fixed else None
        # states of the datasets of persistent workers
        self._ends: list[Any] = [None] * self._num_workers
        self.engine = engine_of(
            loader,
            dataset=self._shard,
            batch_size=None,
            batch_sampler=None,
            drop_last=False,
            collate_fn=BlockCollate(loader.collate_fn, cutting),
        )

    def size(self) -> int | None:
        """Return the stream's length if its end can be computed: one reader, the same stream on all ranks."""
        is_known = self._cutting.sharing == "strided" and self._num_workers == 1
        return length_of(self._dataset) if is_known else None

    def steps(self) -> int | None:
        size = self.size()
        return None if size is None else self._cutting.plan.steps(size)

    def begin(self, position: Position) -> Position:
        return position

    def remember(self, position: Position) -> Position:
        if position.stream is not None:
            return position
        persistent = self._loader.num_workers and self._loader.persistent_workers
        current_origin = self._shard.hasten_carried.capture()
        workers = tuple(
            WorkerState(
                origin=(end if persistent and end is not None else current_origin)
            )
            for end in self._ends
        )
        return (
            position
            if all(worker.origin is None for worker in workers)
            else self._encode(position, StreamState(workers, 0))
        )

    def _first(self, position: Position) -> Any:
        """Return the first batch of the epoch of `position`; None when it has none. Call before `open`."""
        twin = self.copied()
        seed = derive_seed(position.seed, position.epoch, 5)
        twin.engine.generator = torch.Generator().manual_seed(seed)
        start = twin._decode(position)
        beginning = StreamState(
            tuple(WorkerState(origin=worker.origin) for worker in start.workers), 0
        )
        carried = self._shard.hasten_carried
        saved_state = carried.capture()
        if all(worker.origin is None for worker in start.workers):
            carried.restore(None)
        items = twin._items(beginning, position)
        item = next(items, None)
        items.close()  # ends its workers
        # without workers, the dataset itself has been read
        carried.restore(saved_state)
        return None if item is None else item[0]

    def open(self, position: Position) -> Iterator[Item]:
        start = self._decode(position)
        cutting = self._cutting
        agrees = self._comm.size > 1 and cutting.even and self.size() is None
        # Ranks with separate shards may run out before others, and then repeat the epoch's first batch.
        pads = agrees and cutting.sharing != "strided" and not cutting.drop_last
        first = self._first(position) if pads and start.position else None
        # persistent workers of an earlier epoch do not see the new start
        if position.stream is not None:
            self.engine.__dict__["_iterator"] = None
        if first is not None and shares_epochs(self._loader.dataset):
            # the first iterator has counted the epoch on every rank
            self._comm.barrier("first batch of a stream")
        items = self._items(start, position)
        if not agrees:
            return looking_ahead(items)
        return agreed(items, self._comm, cutting.drop_last, start, first)

    def _items(self, start: StreamState, position: Position) -> Generator[Item]:
        """Yield the batches from a state on."""
        shard = self._shard
        shard.hasten_serial += 1
        shard.hasten_control.copy_(
            torch.tensor(
                [position.epoch, shard.hasten_serial, derive_seed(position.seed)]
            )
        )
        shard.hasten_start = start
        with nullcontext() if self._loader.num_workers else self._process.kept():
            blocks = iter(self.engine)
        return self._read(blocks, start, position)

    def reached(
        self, start: Position, steps: int, source_state: StreamState
    ) -> Position:
        return self._encode(start, source_state)

    def _encode(self, position: Position, state: StreamState) -> Position:
        workers = state.workers
        stream: dict[str, Any] = {
            "workers": self._num_workers,
            "positions": [worker.position for worker in workers],
            "turn": state.turn,
        }
        if any(worker.state is not None for worker in workers):
            stream["states"] = [worker.state for worker in workers]
        if any(worker.rng is not None for worker in workers):
            stream["rngs"] = [
                None if worker.rng is None else encode_states(worker.rng)
                for worker in workers
            ]
        if any(worker.origin is not None for worker in workers):
            stream["origins"] = [worker.origin for worker in workers]
        if self._cutting.sharing != "strided":
            stream["shards"] = self._cutting.num_shards
        return replace(position, consumed=state.position, stream=stream)

    def skipped(self, start: Position, num_batches: int) -> Position:
        rounds, num_extra = divmod(num_batches, self._num_workers)
        size = self._cutting.plan.global_batch
        origins = (start.stream or {}).get("origins", (None,))
        workers = tuple(
            WorkerState(
                (rounds + (worker < num_extra)) * size,
                origin=origins[worker % len(origins)],
            )
            for worker in range(self._num_workers)
        )
        return self._encode(start, StreamState(workers, num_extra))

    def change(self, name: str, value: Any) -> None:
        setattr(
            self.engine,
            name,
            BlockCollate(value, self._cutting) if name == "collate_fn" else value,
        )

    def copied(self, even: bool | None = None) -> StreamSource:
        cutting = self._cutting if even is None else replace(self._cutting, even=even)
        return StreamSource(
            self._loader, cutting, self._dataset, self._comm, self._rank
        )

    def _decode(self, position: Position) -> StreamState:
        if position.stream is None:
            return StreamState((WorkerState(),) * self._num_workers, 0)
        saved, stream = position.stream["workers"], position.stream
        origins = stream.get("origins", (None,) * saved)
        if self._made_with is not None and any(
            origin not in (None, self._made_with) for origin in origins
        ):
            raise DataError(
                "the stream's shards are shuffled without a seed, or with a different one than in the saved run, so their order cannot "
                "be reproduced and samples would be lost or read twice. Give shuffle() the seed of "
                "the saved run; without one, start a new epoch with loader.set_epoch() instead of a loaded state."
            )
        # the start of an epoch, for any number of workers and ranks
        if not any(stream["positions"]):
            return StreamState(
                tuple(
                    WorkerState(origin=origins[worker % saved])
                    for worker in range(self._num_workers)
                ),
                0,
            )
        self._check(stream)
        rngs = [
            None if rng is None else decode_states(rng)
            for rng in stream.get("rngs", (None,) * saved)
        ]
        states = stream.get("states", (None,) * saved)
        return StreamState(
            tuple(map(WorkerState, stream["positions"], states, rngs, origins)),
            stream["turn"],
        )

    def _check(self, stream: Mapping[str, Any]) -> None:
        """Raise DataError unless a position inside an epoch was saved with as many workers and the same sharding."""
        saved = stream["workers"]
        if saved != self._num_workers:
            raise DataError(
                f"the stream's position was saved with {saved} reading worker(s), and this loader has "
                f"{self._num_workers}; each worker reads a different part, so samples would be lost or repeated. "
                f"Set num_workers={saved}."
            )
        shards = stream.get("shards", self._cutting.num_shards)
        has_own_shard = self._cutting.sharing != "strided"
        if shards != self._cutting.num_shards or ("shards" in stream) != has_own_shard:
            raise DataError(
                f"the stream's position was saved with the dataset's shards split over {shards} rank(s), and there are "
                f"{self._cutting.num_shards} now; the parts of the ranks differ, so samples would be lost or "
                f"repeated. Resume on {shards} data-parallel processes, or use dispatch_batches=True from the start."
            )

    def _read(
        self, blocks: Iterator[Any], start: StreamState, position: Position
    ) -> Generator[Item]:
        workers = list(start.workers)
        number = 0
        in_process = not self._loader.num_workers
        while True:
            try:
                with self._process.kept() if in_process else nullcontext():
                    block = next(blocks)
            except StopIteration:
                return
            # of the user's dataset or a worker: any type, re-raised unchanged
            except Exception as error:
                error.add_note(
                    f"hasten: reading the stream failed on rank {self._rank}, epoch {position.epoch}, batch {number} after "
                    f"element {position.consumed}."
                )
                raise
            batch, padding, (_, worker, state, blank) = block
            if blank == "begin":
                workers[worker] = state
            elif blank == "end":
                self._ends[worker] = state.origin
            if blank:
                continue
            workers[worker] = state
            number += 1
            yield (
                batch,
                padding,
                False,
                StreamState(tuple(workers), (worker + 1) % self._num_workers),
            )


def looking_ahead(items: Iterator[Item]) -> Iterator[Item]:
    """Yield the same items, with the last one marked."""
    ahead = next(items, None)
    while ahead is not None:
        item, ahead = ahead, next(items, None)
        yield item if ahead is not None else ended(item)


def agreed(
    items: Iterator[Item],
    comm: Comm,
    drop_last: bool,
    start: StreamState,
    first: Any = None,
) -> Iterator[Item]:
    """Yield the same items for a step count common to all ranks, with one small exchange per step before each batch.

    A rank that runs out early repeats the epoch's first batch as padding until the others are done, or with
    `drop_last` all end with the first that does. `start` is the state before the items, and `first` the epoch's first batch
    if they start inside it.

    Raises: DataError on every rank when some rank has no batch; PeerFailedError when reading failed on another rank.
    """
    item, error = _next(items)
    if first is None and item is not None:
        first = trees.map_leaves(own_copy, item[0])
    gathered = _share_ends(
        comm,
        _FAILED
        if error
        else _MORE
        if item is not None
        else _ENDED
        if start.position
        else _EMPTY,
    )
    _raise_failures(gathered, error, comm)
    has_next = _has_next_step(gathered, comm, drop_last)
    state = start
    while has_next:
        batch, padding, _, state = (
            (trees.map_leaves(own_copy, first), Padding(0, None), False, state)
            if item is None
            else item
        )
        item, error = _next(items)
        gathered = _share_ends(
            comm, _FAILED if error else _MORE if item is not None else _ENDED
        )
        _raise_failures(gathered, error, comm)
        has_next = _has_next_step(gathered, comm, drop_last)
        yield batch, padding, not has_next, state


def _next(items: Iterator[Item]) -> tuple[Item | None, Exception | None]:
    """Return the next item, or the error: errors of the user's stream must reach the waiting ranks."""
    try:
        return next(items, None), None
    except Exception as error:  # of any type, and re-raised by the caller
        return None, error


def _share_ends(comm: Comm, own_end: int) -> list[int]:
    gathered: list[int] = (
        comm.all_gather(torch.tensor([own_end], dtype=torch.int64)).flatten().tolist()
    )
    return gathered


def _raise_failures(gathered: list[int], error: Exception | None, comm: Comm) -> None:
    if error is not None:
        raise error
    failed = [
        comm.ranks[member] for member, end in enumerate(gathered) if end == _FAILED
    ]
    if failed:
        raise PeerFailedError(
            f"reading the stream failed on rank(s) {', '.join(map(str, failed))}, so this rank cannot take a step with them. See the "
            "traceback of that rank."
        )


def _has_next_step(gathered: list[int], comm: Comm, drop_last: bool) -> bool:
    empty = [comm.ranks[member] for member, end in enumerate(gathered) if end == _EMPTY]
    if empty and len(empty) < len(gathered) and not drop_last:
        raise DataError(
            f"the stream has no sample for rank(s) {', '.join(map(str, empty))} of {len(gathered)}, so these ranks could not take part in a "
            f"step. Give the dataset at least {len(gathered)} shards, or samples for every rank; "
            f"drop_last=True ends the epoch with the shortest rank, even_batches=False ends each rank separately."
        )
    return (
        all(end == _MORE for end in gathered)
        if drop_last
        else any(end == _MORE for end in gathered)
    )


def ended(item: Item) -> Item:
    """Return the item, marked as the epoch's last."""
    batch, padding, _, state = item
    return batch, padding, True, state
