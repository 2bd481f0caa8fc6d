"""Loaders and calls that replicas which may be lost do not support are refused before anything is trained."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import pytest
import torch
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    SequentialSampler,
    TensorDataset,
)

from hasten import Accelerator
from hasten.accelerator.components import components
from hasten.data.position import Position
from hasten.errors import ConfigError, StepError
from hasten.extensions.survive.ledger_plan import Ledger, PositionRange
from hasten.extensions.survive.source import LedgerSource
from hasten.optim import window
from hasten.optim.clock import StepClock
from hasten.optim.run_part import RunPart

DATA = TensorDataset(torch.arange(12.0))


class Holder:
    """A replica that is alone, for the source of a loader."""

    name = "0"

    def __init__(self) -> None:
        self.ledger = Ledger(0, 1)

    def open_ledger(self, size: int, rows: int, drop_last: bool, seed: int) -> None:
        self.ledger = Ledger(size, rows, drop_last, seed, members=("0",))

    def enter_epoch(self, epoch: int) -> None:
        self.ledger.epoch = epoch

    def round(self, epoch: int) -> list[PositionRange] | None:
        return None if self.ledger.exhausted else self.ledger.deal_batches()[self.name]


class Stream(IterableDataset[int]):
    """Samples without positions."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(4))


def source_of(loader: DataLoader[Any], **settings: Any) -> LedgerSource:
    """Return the source that `prepare` makes of a loader for replicas."""
    # Any: hasten's loader
    prepared: Any = Accelerator(cpu=True, **settings).prepare(loader)
    return LedgerSource(prepared.parts.source, cast(Any, Holder()), StepClock(), 2)


def test_a_stream_is_refused() -> None:
    with pytest.raises(
        ConfigError,
        match=r"map-style dataset with a batch_size.*Use a dataset with __len__",
    ):
        source_of(DataLoader(Stream(), batch_size=2))


def test_a_batch_sampler_is_refused() -> None:
    sampler = _Batches(SequentialSampler(DATA), 3, False)
    with pytest.raises(ConfigError, match="no batch sampler"):
        source_of(DataLoader(DATA, batch_sampler=sampler))


class _Batches(BatchSampler):
    """A batch sampler of the user."""


def test_a_sampler_without_seed_is_refused() -> None:
    source = source_of(DataLoader(DATA, batch_size=3, sampler=[3, 1, 2]))
    with pytest.raises(
        ConfigError, match=r"computed from seed and epoch.*Use shuffle=True"
    ):
        next(source.open(Position()))


def test_skipped_and_copied_loaders_are_refused() -> None:
    source = source_of(DataLoader(DATA, batch_size=3))
    with pytest.raises(ConfigError, match=r"skip_first_batches\(2\).*Use save_state"):
        source.skipped(Position(), 2)
    with pytest.raises(ConfigError, match=r"cannot be copied.*Iterate over the loader"):
        source.copied()


def test_a_plain_loader_is_read_by_the_ledger() -> None:
    batches = [
        batch[0] for batch in source_of(DataLoader(DATA, batch_size=5)).open(Position())
    ]
    assert torch.cat([batch[0] for batch in batches]).tolist() == list(range(12))


class Exchange(RunPart):
    def gradients(self, optimizer: window.Holder) -> bool:
        return False


def test_a_closure_is_refused() -> None:
    accelerator = Accelerator(cpu=True)
    model = nn.Linear(1, 1)
    prepared: Any  # Any: hasten's optimizer
    _, prepared = accelerator.prepare(
        model, torch.optim.SGD(model.parameters(), lr=0.1)
    )
    components(accelerator).clock.parts.add(Exchange())
    with pytest.raises(
        StepError,
        match=r"step\(closure\) .* Exchange cannot change them\. Use an optimizer without a closure",
    ):
        prepared.step(lambda: torch.zeros(()))
