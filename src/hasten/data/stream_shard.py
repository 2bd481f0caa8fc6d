"""Sharded reading of streams: each (rank, worker) selects its blocks of an IterableDataset in the reading process."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any, Literal, NamedTuple

import torch
from torch.utils.data import IterableDataset, get_worker_info

from hasten.config.sections.loop import Pad
from hasten.data.batch_plan import LoaderPlan, Padding, derive_seed
from hasten.data.carried_state import CarriedState
from hasten.data.foreign import (
    detach_epoch_counter,
    has_plain_state,
    is_hub_stream,
    restart_stream,
    state_loses_samples,
)
from hasten.data.random_states import OwnRng, RandomStates, States, seed_everything
from hasten.data.source import Forwarding

# Any in this file: samples, batches and dataset states are objects of the user.
Sharing = Literal["strided", "own", "asked", "given"]
"""strided: every rank reads the stream and selects its blocks. own: prepare() sharded the dataset for this rank. asked:
the dataset returns the shard of each (rank, worker) from `shard(num_shards=, index=)`. given: the user's dataset is
this rank's shard already."""


class WorkerState(NamedTuple):
    """Position of one worker's stream, with the state that continues it."""

    position: int = 0
    """Number of elements read since the start of the epoch."""
    state: Any = None
    """The stream's `state_dict()` there, if it is reliable; else the stream is read again up to the position."""
    rng: States | None = None
    """Random states of the reader there, if there is a state and any number was drawn."""
    origin: Any = None
    """State that the dataset carried over when the epoch started (see CarriedState)."""


class StreamState(NamedTuple):
    """Positions of all workers' streams after a batch: the content of `Position.stream`, before it is encoded."""

    workers: tuple[WorkerState, ...]
    turn: int
    """Index of the worker whose batch comes next."""

    @property
    def position(self) -> int:
        """Number of elements that all workers have read."""
        return sum(worker.position for worker in self.workers)


class RankSamples(NamedTuple):
    """The samples of one rank's batch, before they are collated."""

    samples: Any
    real: int | None
    """Number of samples that are not padding; None for all."""
    seed: int
    """Seed for the random draws of the collate function."""


class SampleBlock(NamedTuple):
    """Samples that a worker read in one round, and the position of its stream afterwards."""

    samples: tuple[RankSamples | None, ...]
    """This rank's samples, or those of every rank if one rank reads for all; None for a rank without samples."""
    worker: int
    state: WorkerState
    blank: Literal["", "begin", "turn", "end"] = ""
    """Marks a block without a batch. begin: state of the worker's dataset at the start of the epoch. turn: placeholder
    for a worker that had its turn before the resume. end: the worker's stream has ended; state of its dataset."""


@dataclass(frozen=True, slots=True)
class Cutting:
    """Settings for cutting a stream into blocks."""

    num_shards: int
    shard: int
    rows: int
    """Number of elements of one block: one rank's batch."""
    batched: bool
    """False when elements are batches already (batch_size=None)."""
    drop_last: bool
    even: bool
    sharing: Sharing = "strided"
    pad: Pad = "least"
    step: int | None = None
    """Number of elements that all ranks take in one round; None for `rows` on each."""
    every: bool = False
    """True if this rank cuts the blocks of all ranks, to send them."""

    @property
    def plan(self) -> LoaderPlan:
        """Plan that cuts the elements a worker reads into rounds, and rounds into blocks.

        A separate shard has separate rounds, whose last block is filled, because other ranks end elsewhere.
        """
        has_own_shard = self.sharing != "strided"
        return LoaderPlan(
            num_shards=1 if has_own_shard else self.num_shards,
            shard=0 if has_own_shard else self.shard,
            global_batch=self.rows
            if has_own_shard
            else self.step or self.rows * self.num_shards,
            drop_last=self.drop_last,
            even=self.even,
            pad="full" if has_own_shard and self.num_shards > 1 else self.pad,
        )


class StreamShard(Forwarding, IterableDataset[SampleBlock]):
    """This rank's blocks of a stream, in whole rounds, so that positions mean the same on every rank."""

    def __init__(
        self, dataset: Any, cutting: Cutting, num_workers: int, process: RandomStates
    ) -> None:
        self.hasten_cutting = cutting
        self.hasten_process = process
        self.hasten_start: StreamState | None = None
        self.hasten_serial = 0  # of the opening that the start is for
        # (epoch, serial of the opening, seed): read by workers, also by persistent ones
        self.hasten_control = torch.zeros(3, dtype=torch.int64)
        if num_workers:
            self.hasten_control.share_memory_()  # type: ignore[no-untyped-call]
        self.hasten_dataset = dataset
        self.hasten_carried = CarriedState(
            dataset, attributes=not is_hub_stream(dataset)
        )

    def __iter__(self) -> Iterator[SampleBlock]:
        worker_info = get_worker_info()
        worker, num_workers = (
            (0, 1) if worker_info is None else (worker_info.id, worker_info.num_workers)
        )
        epoch, serial, seed = self.hasten_control.tolist()
        dataset = self.hasten_dataset
        cutting = self.hasten_cutting
        dataset_state = self.hasten_carried
        if worker_info is not None:
            set_epoch = getattr(dataset, "set_epoch", None)
            if callable(set_epoch):
                detach_epoch_counter(dataset)
                set_epoch(epoch)
        start_state = self.hasten_start if self.hasten_serial == serial else None
        worker_state, turn = (
            (WorkerState(), 0)
            if start_state is None
            else (start_state.workers[worker], start_state.turn)
        )
        # without an origin, nothing had changed since prepare
        if worker_state.origin is not None or worker_state.position:
            dataset_state.restore(worker_state.origin)
        worker_state = worker_state._replace(origin=dataset_state.capture())
        # Ranks that read the same elements draw the same numbers; so do ranks that shuffle before they split.
        draws_alike = cutting.sharing in ("strided", "given")
        seed_numbers = [seed, epoch, worker]
        if not draws_alike:
            seed_numbers.append(cutting.shard)
        rng = OwnRng(derive_seed(*seed_numbers, 3), self.hasten_process)
        restart_stream(dataset, epoch)
        with rng.entered():
            stream = _select_shard(dataset, cutting, worker, num_workers)
        cutter = _Cutter(stream, cutting, worker, rng, (seed, epoch))
        # in a single process, the dataset itself can be inspected
        end_state = dataset_state if worker_info is not None else None
        # evaluated now, not when a block is requested
        return cutter.blocks(worker_state, worker < turn, end_state)


def _select_shard(dataset: Any, cutting: Cutting, worker: int, num_workers: int) -> Any:
    """Return the stream that one worker reads."""
    if cutting.sharing != "asked":
        return dataset
    shard_index = cutting.shard * num_workers + worker
    return dataset.shard(num_shards=cutting.num_shards * num_workers, index=shard_index)


class _Cutter:
    """Iterator of this rank's blocks of one worker's stream, with separate random states."""

    def __init__(
        self,
        stream: Any,
        cutting: Cutting,
        worker: int,
        rng: OwnRng,
        seeds: tuple[int, int],
    ) -> None:
        self._stream = stream
        self._worker = worker
        self._rng = rng
        self._seeds = seeds
        self._batched = cutting.batched
        self._plan = plan = cutting.plan
        self._shards = (
            range(plan.num_shards)
            if cutting.every
            else range(plan.shard, plan.shard + 1)
        )
        # of the ranks, in the seeds of their batches
        self._names = self._shards if cutting.every else (cutting.shard,)
        self._num_first = (
            plan.max_padding
            if plan.even and (plan.num_shards > 1 or plan.pad == "full")
            else 0
        )
        in_worker = get_worker_info() is not None
        self._trusted = has_plain_state(stream) and not state_loses_samples(
            stream, in_worker
        )
        # The state of a stream of `datasets` includes its generators. For other streams this is unknown, so those that
        # draw random numbers are read again up to the position instead.
        self._watched = (
            CarriedState(stream, attributes=False)
            if self._trusted and not is_hub_stream(stream)
            else None
        )
        self._drawn_from = None if self._watched is None else self._watched.capture()

    def blocks(
        self, start: WorkerState, had_turn: bool, end: CarriedState | None
    ) -> Iterator[SampleBlock]:
        """Yield the blocks from a position on; a worker reports its position before the user gets any of them."""
        with closing(self._rng):
            yield from self._blocks(start, had_turn, end)

    def _blocks(
        self, start: WorkerState, had_turn: bool, end: CarriedState | None
    ) -> Iterator[SampleBlock]:
        if end is not None:
            yield SampleBlock((), self._worker, start, blank="begin")
        if had_turn:
            yield SampleBlock((), self._worker, start, blank="turn")
        with self._rng.entered():
            first_elements, elements = self._seek(start)
        if start.state is not None:
            self._rng.place(start.rng)
        plan = self._plan
        position = start.position
        while True:
            with self._rng.entered():
                num_wanted = self._num_first - len(first_elements)
                round_ = _read_round(elements, plan, self._shards, num_wanted)
            first_elements += round_.first[: max(num_wanted, 0)]
            is_full = round_.taken == plan.global_batch
            if not round_.taken or (not is_full and plan.drop_last):
                break
            # After its end, a stream's state may mean the next epoch's start, so the stream is read up to the position.
            stream_state = self._state() if is_full else None
            position += round_.taken
            random_states = self._rng.state() if stream_state is not None else None
            rank_samples = tuple(
                self._samples_of(round_, first_elements, shard, position)
                for shard in self._shards
            )
            if any(rank_samples):
                yield SampleBlock(
                    rank_samples,
                    self._worker,
                    WorkerState(position, stream_state, random_states, start.origin),
                )
            if not is_full:
                break
        end_state = None if end is None else end.capture()
        if end_state is not None:
            yield SampleBlock(
                (), self._worker, WorkerState(position, origin=end_state), blank="end"
            )

    def _samples_of(
        self, round_: _Round, first_elements: list[Any], shard: int, position: int
    ) -> RankSamples | None:
        """Return the samples of one rank in a round that ends at `position`, padded with the epoch's first elements."""
        share = self._plan.part(round_.taken, shard=shard)
        if not share.rows:
            return None
        share_end = share.first + share.rows
        own_samples = round_.elements[
            share.first - round_.begin : share_end - round_.begin
        ]
        pad_positions = range(max(share.first, round_.taken), share_end)
        own_samples.extend(
            first_elements[(element_index - round_.taken) % len(first_elements)]
            for element_index in pad_positions
        )
        seed_shard = self._names[shard - self._shards.start]
        seed = derive_seed(*self._seeds, seed_shard, self._worker, position, 4)
        return RankSamples(
            own_samples if self._batched else own_samples[0],
            None if share.real == share.rows else share.real,
            seed,
        )

    def _seek(self, start: WorkerState) -> tuple[list[Any], Iterator[Any]]:
        """Return the epoch's first elements, if padding may need them, and the stream from the position on."""
        stream = self._stream
        # chain stays exhausted: litdata streams restart on the next call
        stream_elements: Iterator[Any] = chain(iter(stream))
        if not start.position:
            return [], stream_elements
        first_elements = list(
            islice(stream_elements, min(self._num_first, start.position))
        )
        if start.state is None:
            _skip_elements(stream_elements, start.position - len(first_elements))
            return first_elements, stream_elements
        stream.load_state_dict(start.state)
        return first_elements, chain(iter(stream))

    def _state(self) -> Any:
        """Return the stream's `state_dict()`, if resuming from here needs nothing else; else None."""
        if not self._trusted:
            return None
        if self._watched is None:
            return self._stream.state_dict()
        if self._rng.state() is not None or self._watched.generators_changed(
            self._drawn_from
        ):
            self._trusted = False
            return None
        return copy.deepcopy(self._stream.state_dict())


class BlockCollate:
    """Wrapper that applies the user's collate_fn to a block's samples and passes the other fields on."""

    def __init__(self, collate_fn: Callable[[Any], Any], cutting: Cutting) -> None:
        self.collate_fn = collate_fn
        self.cutting = cutting

    def __call__(self, block: SampleBlock) -> tuple[Any, Padding | None, SampleBlock]:
        """Return (batch, padding, block without samples); if one rank reads for all, a list of (batch, padding)."""
        rank_batches = [
            None if rank_samples is None else self._collated(rank_samples)
            for rank_samples in block.samples
        ]
        batch, padding = (
            (rank_batches, None)
            if self.cutting.every
            else (rank_batches and rank_batches[0]) or (None, None)
        )
        return batch, padding, block._replace(samples=())

    def _collated(self, rank_samples: RankSamples) -> tuple[Any, Padding | None]:
        seed_everything(rank_samples.seed)
        batch = self.collate_fn(rank_samples.samples)
        rows = len(rank_samples.samples) if self.cutting.batched else None
        if rank_samples.real is None:
            return batch, None
        return batch, Padding(rank_samples.real, rows)


class _Round(NamedTuple):
    """One round of a stream, limited to the elements that some ranks need."""

    first: list[Any]
    """The first elements of the round."""
    elements: list[Any]
    begin: int
    """Index in the round of the first element of `held`."""
    taken: int
    """Number of elements in the round."""


def _read_round(
    elements: Iterator[Any], plan: LoaderPlan, shards: range, num_first: int
) -> _Round:
    """Read one round and hold the elements that may belong to these ranks.

    The last round may be shorter and is then spread over the ranks, so a rank's share is known when the round ends.
    The longer the round, the fewer of its first elements can belong to a rank: at most a quarter of a round is held.
    """
    full_share = plan.part(plan.global_batch, shard=shards[-1])
    num_needed = full_share.first + full_share.rows
    first_elements = []
    round_elements = deque[Any]()
    first_position = 0
    num_taken = 0
    while num_taken < num_needed and (
        next_elements := list(
            islice(elements, min(full_share.rows, num_needed - num_taken))
        )
    ):
        first_elements += next_elements[: max(num_first - num_taken, 0)]
        round_elements.extend(next_elements)
        num_taken += len(next_elements)
        while first_position < min(
            plan.part(num_taken, shard=shards[0]).first, num_taken
        ):
            round_elements.popleft()
            first_position += 1
    num_taken += (
        _skip_elements(elements, plan.global_batch - num_taken)
        if num_taken == num_needed
        else 0
    )
    return _Round(first_elements, list(round_elements), first_position, num_taken)


def _skip_elements(elements: Iterator[Any], max_skipped: int) -> int:
    """Skip up to `count` elements; return the number skipped."""
    num_skipped = 0
    for _ in islice(elements, max(max_skipped, 0)):
        num_skipped += 1
    return num_skipped
