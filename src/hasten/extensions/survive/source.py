"""The source of a loader whose samples are given out by the ledger, batch by batch, to the replicas that are there and their ranks."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterator
from dataclasses import replace
from functools import partial
from itertools import chain, starmap
from typing import Any

import numpy as np

from hasten.data.batch_plan import Indices
from hasten.data.position import Position
from hasten.data.sampler import IndexBatch
from hasten.data.source import BatchSource, IndexedSource, Item, OuterSource
from hasten.errors import ConfigError
from hasten.extensions.survive.ledger_plan import (
    PositionRange,
    list_positions,
    rank_positions,
)
from hasten.extensions.survive.replica import Replica
from hasten.optim.clock import StepClock


class LedgerSource(OuterSource):
    """Source that reads the positions which the ledger gives to this replica.

    Batches are read ahead by the loader's workers as if the members stayed the same; when they change, reading starts
    again at the new positions.
    """

    def __init__(
        self,
        inner_source: BatchSource,
        replica: Replica,
        clock: StepClock,
        num_replicas: int,
    ) -> None:
        super().__init__(inner_source)
        if (
            not isinstance(inner_source, IndexedSource)
            or inner_source.assignment.form != "rows"
        ):
            raise ConfigError(
                f"survive needs a loader over a map-style dataset with a batch_size, and this one is read by {type(inner_source).__name__}; without "
                "positions in a common order, the samples of a lost replica cannot be given out again. Use a dataset with __len__ and "
                "__getitem__, no batch sampler, and dispatch_batches=False."
            )
        self._indexed = inner_source
        self._replica = replica
        self._clock = clock
        self._num_replicas = num_replicas
        batch_plan = inner_source.assignment.plan
        self._rows = batch_plan.global_batch
        self._drop_last = batch_plan.drop_last
        self._part = partial(
            rank_positions, rank=batch_plan.shard, num_ranks=batch_plan.num_shards
        )

    def steps(self) -> int | None:
        """Return the number of batches of an epoch while all replicas are there."""
        num_samples = self._indexed.size()
        assert num_samples is not None, "an order with positions has a size"
        global_batch = self._rows * self._num_replicas
        if self._drop_last:
            return num_samples // global_batch
        return -(-num_samples // global_batch)

    def reached(self, start: Position, steps: int, source_state: Any) -> Position:
        return self._indexed.reached(start, steps, source_state)

    def skipped(self, start: Position, num_batches: int) -> Position:
        raise ConfigError(
            f"skip_first_batches({num_batches}) counts the batches of one process, and with survive the ledger decides which replica reads "
            "which batch. Use save_state() and load_state(), which keep the ledger."
        )

    def copied(self, even: bool | None = None) -> BatchSource:
        raise ConfigError(
            "a loader whose samples are given out over replicas that may be lost has one position in the run, so it cannot be copied for "
            "skip_first_batches() or join_uneven_inputs(). Iterate over the loader that prepare() returned."
        )

    def open(self, position: Position) -> Generator[Item]:
        """Yield this replica's batches until the epoch ends, or until the run has left it behind."""
        num_samples = self._indexed.size()
        assert num_samples is not None, "an order with positions has a size"
        replica = self._replica
        clock = self._clock
        replica.open_ledger(num_samples, self._rows, self._drop_last, position.seed)
        replica.enter_epoch(position.epoch)
        seek = self._make_seek(position)
        read_ahead = _ReadAhead(self._indexed, replica, position, seek, self._part)
        try:
            while (ranges := replica.round(position.epoch)) is not None:
                batch, is_last = read_ahead.take_batch(ranges)
                is_empty = not self._part(ranges)
                if is_empty:  # it only keeps this rank's loop in step with the others
                    clock.weights.idle = True
                yield batch[0], batch[1], is_last, batch[3]
                clock.weights.idle = False
        finally:
            clock.weights.idle = False
            read_ahead.close()

    def _make_seek(self, position: Position) -> Callable[[Indices], Indices]:
        sample_order = self._indexed.assignment.order
        seek = sample_order.seek(replace(position, seed=self._replica.ledger.seed))
        if seek is None:
            raise ConfigError(
                f"survive needs an order of samples that is computed from seed and epoch, and {type(sample_order).__name__} draws from a sampler that "
                "each replica would draw from differently. Use shuffle=True or shuffle=False, with the default use_seedable_sampler=True."
            )
        return seek


class _ReadAhead:
    """Reader of the batches that this rank of the replica gets if the members stay the same."""

    def __init__(
        self,
        inner: IndexedSource,
        replica: Replica,
        position: Position,
        seek: Callable[[Indices], Indices],
        part_of: Callable[[list[PositionRange]], list[PositionRange]],
    ) -> None:
        self._inner = inner
        self._replica = replica
        self._at = position
        self._seek = seek
        self._part = part_of
        self._items: Generator[Item] | None = None
        self._expected: deque[tuple[list[PositionRange], bool]] = deque()

    def take_batch(self, ranges: list[PositionRange]) -> tuple[Item, bool]:
        """Return this rank's part of the batch at these positions, and whether it is expected to be the epoch's last."""
        for _ in range(2):
            if self._items is None:
                self._items = self._inner.open(self._at, self._index_batches(ranges))
            read_item = next(self._items, None)
            if read_item is not None:
                expected_ranges, is_last = self._expected.popleft()
                if expected_ranges == ranges:
                    return read_item, is_last
            self.close()
        raise AssertionError("reading starts at the requested positions")

    def _index_batches(self, first_ranges: list[PositionRange]) -> Iterator[IndexBatch]:
        """Return the indices of the batch at `first`, then of those that follow it if the members stay the same."""
        ledger = self._replica.ledger
        # from the ledger as it is now: it has given out `first` only
        next_batches = ledger.preview_batches(self._replica.name)
        return starmap(
            self._index_batch, chain([(first_ranges, ledger.exhausted)], next_batches)
        )

    def _index_batch(self, ranges: list[PositionRange], is_last: bool) -> IndexBatch:
        self._expected.append((ranges, is_last))
        sample_positions = list_positions(self._part(ranges))
        sample_indices: list[int] = self._seek(
            np.array(sample_positions or [0], dtype=np.int64)
        ).tolist()
        return sample_indices, None if sample_positions else 0, is_last

    def close(self) -> None:
        """Stop reading ahead."""
        if self._items is not None:
            self._items.close()
        self._items = None
        self._expected.clear()
