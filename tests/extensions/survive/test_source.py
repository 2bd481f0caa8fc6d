"""The source of a replica's loader reads each sample once while the members stay the same, and again only where they change."""

from __future__ import annotations

from collections import Counter
from typing import Any, cast

from torch.utils.data import DataLoader, Dataset

from hasten import Accelerator
from hasten.data.position import Position
from hasten.extensions.survive.ledger_plan import Ledger, PositionRange
from hasten.extensions.survive.source import LedgerSource
from hasten.optim.clock import StepClock


class Counting(Dataset[int]):
    """Samples that count how often they are read."""

    def __init__(self) -> None:
        self.reads: Counter[int] = Counter()

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> int:
        self.reads[index] += 1
        return index


class Pair:
    """The first of two replicas, which applies an update after each batch; the other is lost after some of them."""

    name = "0"

    def __init__(self, lost_after: int | None) -> None:
        self.ledger = Ledger(0, 1)
        self._lost_after = lost_after

    def open_ledger(self, size: int, rows: int, drop_last: bool, seed: int) -> None:
        self.ledger = Ledger(size, rows, drop_last, seed, members=("0", "1"))

    def enter_epoch(self, epoch: int) -> None:
        self.ledger.epoch = epoch

    def round(self, epoch: int) -> list[PositionRange] | None:
        ledger = self.ledger
        if ledger.rounds:
            contributors = (
                ("0",)
                if self._lost_after is not None and ledger.step >= self._lost_after
                else ("0", "1")
            )
            ledger.commit_update(contributors, contributors)
        return None if ledger.exhausted else ledger.deal_batches()[self.name]


def read(lost_after: int | None) -> tuple[list[list[int]], Counter[int]]:
    """Return the batches of the first replica, and how often each sample was read."""
    dataset = Counting()
    loader: Any = DataLoader(dataset, batch_size=4, shuffle=False)
    prepared: Any = Accelerator(cpu=True).prepare(loader)  # Any: hasten's loader
    source = LedgerSource(
        prepared.parts.source, cast(Any, Pair(lost_after)), StepClock(), 2
    )
    return [
        item[0].tolist() for item in source.open(Position(epoch=0, seed=0))
    ], dataset.reads


def test_each_sample_is_read_once_while_the_members_stay_the_same() -> None:
    batches, reads = read(None)
    assert batches == [[0, 1, 2, 3], [8, 9, 10, 11], [16, 17, 18, 19]]
    assert reads == Counter(index for batch in batches for index in batch)


def test_reading_starts_again_once_where_the_members_change() -> None:
    batches, reads = read(1)
    assert sorted(index for batch in batches for index in batch) == [
        0,
        1,
        2,
        3,
        *range(8, 24),
    ]
    # one batch was read for positions that were given out differently
    assert reads.total() == 20 + 4
