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
from hasten.data.foreign import find_length, has_fixed_shard_order, shares_epochs
from hasten.data.position import Position, Unit
from hasten.data.random_states import RandomStates, decode_states, encode_states
from hasten.data.source import Item, clone_leaf, copy_loader
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
        has_fixed_order = has_fixed_shard_order(loader.dataset)
        if has_fixed_order:
            self._prepared_state = self._shard.hasten_carried.capture()
        else:
            self._prepared_state = None
        # states of the datasets of persistent workers
        self._ends: list[Any] = [None] * self._num_workers
        self.engine = copy_loader(
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
        return find_length(self._dataset) if is_known else None

    def steps(self) -> int | None:
        size = self.size()
        if size is None:
            return None
        return self._cutting.plan.steps(size)

    def begin(self, position: Position) -> Position:
        return position

    def remember(self, position: Position) -> Position:
        if position.stream is not None:
            return position
        has_persistent_workers = (
            self._loader.num_workers and self._loader.persistent_workers
        )
        current_origin = self._shard.hasten_carried.capture()
        worker_states = tuple(
            WorkerState(
                origin=(
                    end
                    if has_persistent_workers and end is not None
                    else current_origin
                )
            )
            for end in self._ends
        )
        if all(worker_state.origin is None for worker_state in worker_states):
            return position
        return self._encode(position, StreamState(worker_states, 0))

    def _read_first_batch(self, position: Position) -> Any:
        """Return the first batch of the epoch of `position`; None when it has none. Call before `open`."""
        first_source = self.copied()
        seed = derive_seed(position.seed, position.epoch, 5)
        first_source.engine.generator = torch.Generator().manual_seed(seed)
        resumed_state = first_source._decode(position)
        epoch_start = StreamState(
            tuple(
                WorkerState(origin=worker.origin) for worker in resumed_state.workers
            ),
            0,
        )
        dataset_state = self._shard.hasten_carried
        saved_state = dataset_state.capture()
        if all(worker.origin is None for worker in resumed_state.workers):
            dataset_state.restore(None)
        first_items = first_source._open_items(epoch_start, position)
        first_item = next(first_items, None)
        first_items.close()  # ends its workers
        # without workers, the dataset itself has been read
        dataset_state.restore(saved_state)
        return None if first_item is None else first_item[0]

    def open(self, position: Position) -> Iterator[Item]:
        start = self._decode(position)
        cutting = self._cutting
        exchanges_ends = self._comm.size > 1 and cutting.even and self.size() is None
        # Ranks with separate shards may run out before others, and then repeat the epoch's first batch.
        may_pad = (
            exchanges_ends and cutting.sharing != "strided" and not cutting.drop_last
        )
        first_batch = None
        if may_pad and start.position:
            first_batch = self._read_first_batch(position)
        # persistent workers of an earlier epoch do not see the new start
        if position.stream is not None:
            self.engine.__dict__["_iterator"] = None
        if first_batch is not None and shares_epochs(self._loader.dataset):
            # the first iterator has counted the epoch on every rank
            self._comm.barrier("first batch of a stream")
        items = self._open_items(start, position)
        if not exchanges_ends:
            return mark_last_item(items)
        return end_together(items, self._comm, cutting.drop_last, start, first_batch)

    def _open_items(self, start: StreamState, position: Position) -> Generator[Item]:
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
        worker_states = state.workers
        stream_state: dict[str, Any] = {
            "workers": self._num_workers,
            "positions": [worker_state.position for worker_state in worker_states],
            "turn": state.turn,
        }
        if any(worker_state.state is not None for worker_state in worker_states):
            stream_state["states"] = [
                worker_state.state for worker_state in worker_states
            ]
        if any(worker_state.rng is not None for worker_state in worker_states):
            stream_state["rngs"] = [
                None if worker_state.rng is None else encode_states(worker_state.rng)
                for worker_state in worker_states
            ]
        if any(worker_state.origin is not None for worker_state in worker_states):
            stream_state["origins"] = [
                worker_state.origin for worker_state in worker_states
            ]
        if self._cutting.sharing != "strided":
            stream_state["shards"] = self._cutting.num_shards
        return replace(position, consumed=state.position, stream=stream_state)

    def skipped(self, start: Position, num_batches: int) -> Position:
        num_rounds, num_extra = divmod(num_batches, self._num_workers)
        round_size = self._cutting.plan.global_batch
        origins = (start.stream or {}).get("origins", (None,))
        worker_states = tuple(
            WorkerState(
                (num_rounds + (worker < num_extra)) * round_size,
                origin=origins[worker % len(origins)],
            )
            for worker in range(self._num_workers)
        )
        return self._encode(start, StreamState(worker_states, num_extra))

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
        num_saved_workers = position.stream["workers"]
        stream = position.stream
        origins = stream.get("origins", (None,) * num_saved_workers)
        if self._prepared_state is not None and any(
            origin not in (None, self._prepared_state) for origin in origins
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
                    WorkerState(origin=origins[worker % num_saved_workers])
                    for worker in range(self._num_workers)
                ),
                0,
            )
        self._check_workers(stream)
        random_states = [
            None if rng is None else decode_states(rng)
            for rng in stream.get("rngs", (None,) * num_saved_workers)
        ]
        states = stream.get("states", (None,) * num_saved_workers)
        return StreamState(
            tuple(
                map(WorkerState, stream["positions"], states, random_states, origins)
            ),
            stream["turn"],
        )

    def _check_workers(self, stream: Mapping[str, Any]) -> None:
        """Raise DataError unless a position inside an epoch was saved with as many workers and the same sharding."""
        num_saved_workers = stream["workers"]
        if num_saved_workers != self._num_workers:
            raise DataError(
                f"the stream's position was saved with {num_saved_workers} reading worker(s), and this loader has "
                f"{self._num_workers}; each worker reads a different part, so samples would be lost or repeated. "
                f"Set num_workers={num_saved_workers}."
            )
        num_saved_shards = stream.get("shards", self._cutting.num_shards)
        has_own_shard = self._cutting.sharing != "strided"
        if (
            num_saved_shards != self._cutting.num_shards
            or ("shards" in stream) != has_own_shard
        ):
            raise DataError(
                f"the stream's position was saved with the dataset's shards split over {num_saved_shards} rank(s), and there are "
                f"{self._cutting.num_shards} now; the parts of the ranks differ, so samples would be lost or "
                f"repeated. Resume on {num_saved_shards} data-parallel processes, or use dispatch_batches=True from the start."
            )

    def _read(
        self, blocks: Iterator[Any], start: StreamState, position: Position
    ) -> Generator[Item]:
        worker_states = list(start.workers)
        num_read = 0
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
                    f"hasten: reading the stream failed on rank {self._rank}, epoch {position.epoch}, batch {num_read} after "
                    f"element {position.consumed}."
                )
                raise
            batch, padding, (_, worker, state, blank_kind) = block
            if blank_kind == "begin":
                worker_states[worker] = state
            elif blank_kind == "end":
                self._ends[worker] = state.origin
            if blank_kind:
                continue
            worker_states[worker] = state
            num_read += 1
            yield (
                batch,
                padding,
                False,
                StreamState(tuple(worker_states), (worker + 1) % self._num_workers),
            )


def mark_last_item(items: Iterator[Item]) -> Iterator[Item]:
    """Yield the same items, with the last one marked."""
    next_item = next(items, None)
    while next_item is not None:
        item = next_item
        next_item = next(items, None)
        yield item if next_item is not None else mark_as_last(item)


def end_together(
    items: Iterator[Item],
    comm: Comm,
    drop_last: bool,
    start: StreamState,
    first_batch: Any = None,
) -> Iterator[Item]:
    """Yield the same items for a step count common to all ranks, with one small exchange per step before each batch.

    A rank that runs out early repeats the epoch's first batch as padding until the others are done, or with
    `drop_last` all end with the first that does. `start` is the state before the items, and `first` the epoch's first batch
    if they start inside it.

    Raises: DataError on every rank when some rank has no batch; PeerFailedError when reading failed on another rank.
    """
    item, error = _read_next(items)
    if first_batch is None and item is not None:
        first_batch = trees.map_leaves(clone_leaf, item[0])
    if item is None and error is None and not start.position:
        rank_end = _EMPTY
    else:
        rank_end = _end_of(item, error)
    rank_ends = _share_ends(comm, rank_end)
    _raise_failures(rank_ends, error, comm)
    has_next = _has_next_step(rank_ends, comm, drop_last)
    stream_state = start
    while has_next:
        if item is None:
            batch = trees.map_leaves(clone_leaf, first_batch)
            padding: Padding | None = Padding(0, None)
        else:
            batch, padding, _, stream_state = item
        item, error = _read_next(items)
        rank_ends = _share_ends(comm, _end_of(item, error))
        _raise_failures(rank_ends, error, comm)
        has_next = _has_next_step(rank_ends, comm, drop_last)
        yield batch, padding, not has_next, stream_state


def _end_of(item: Item | None, error: Exception | None) -> int:
    """Return how this rank's stream continues after a read."""
    if error is not None:
        return _FAILED
    return _ENDED if item is None else _MORE


def _read_next(items: Iterator[Item]) -> tuple[Item | None, Exception | None]:
    """Return the next item, or the error: errors of the user's stream must reach the waiting ranks."""
    try:
        return next(items, None), None
    except Exception as error:  # of any type, and re-raised by the caller
        return None, error


def _share_ends(comm: Comm, own_end: int) -> list[int]:
    rank_ends: list[int] = (
        comm.all_gather(torch.tensor([own_end], dtype=torch.int64)).flatten().tolist()
    )
    return rank_ends


def _raise_failures(rank_ends: list[int], error: Exception | None, comm: Comm) -> None:
    if error is not None:
        raise error
    failed_ranks = [
        comm.ranks[member] for member, end in enumerate(rank_ends) if end == _FAILED
    ]
    if failed_ranks:
        raise PeerFailedError(
            f"reading the stream failed on rank(s) {', '.join(map(str, failed_ranks))}, so this rank cannot take a step with them. See the "
            "traceback of that rank."
        )


def _has_next_step(rank_ends: list[int], comm: Comm, drop_last: bool) -> bool:
    empty_ranks = [
        comm.ranks[member] for member, end in enumerate(rank_ends) if end == _EMPTY
    ]
    if empty_ranks and len(empty_ranks) < len(rank_ends) and not drop_last:
        raise DataError(
            f"the stream has no sample for rank(s) {', '.join(map(str, empty_ranks))} of {len(rank_ends)}, so these ranks could not take part in a "
            f"step. Give the dataset at least {len(rank_ends)} shards, or samples for every rank; "
            f"drop_last=True ends the epoch with the shortest rank, even_batches=False ends each rank separately."
        )
    if drop_last:
        return all(end == _MORE for end in rank_ends)
    return any(end == _MORE for end in rank_ends)


def mark_as_last(item: Item) -> Item:
    """Return the item, marked as the epoch's last."""
    batch, padding, _, state = item
    return batch, padding, True, state
