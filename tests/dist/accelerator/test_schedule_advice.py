"""A script that follows the advice about the length of its schedule ends where it meant to."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LinearLR
from torch.utils.data import DataLoader, TensorDataset

from hasten import Accelerator
from hasten.errors import HastenWarning
from hasten.runtime.context import ProcessContext
from hasten.testing.pool import ranks

EPOCHS = 2


def parts(every: int) -> tuple[Accelerator, Any, Any, Any]:
    accelerator = Accelerator(gradient_accumulation_steps=every)
    net = nn.Linear(1, 1)
    loader = DataLoader(TensorDataset(torch.ones(20, 1)), batch_size=2)
    return accelerator, net, torch.optim.SGD(net.parameters(), lr=1.0), loader


def train(
    accelerator: Accelerator, model: Any, optimizer: Any, schedule: Any, loader: Any
) -> float:
    for _ in range(EPOCHS):
        for (x,) in loader:
            with accelerator.accumulate(model):
                accelerator.backward(model(x).sum() * 0)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
    return float(schedule.get_last_lr()[0])


@ranks(1, 2)
@pytest.mark.parametrize("every", [1, 2, 3])
def test_the_advice_ends_the_schedule_at_its_end(
    ctx: ProcessContext, every: int
) -> None:
    accelerator, net, optimizer, loader = parts(every)
    loader = accelerator.prepare(loader)
    schedule = LinearLR(
        optimizer, 1.0, 0.0, total_iters=accelerator.num_updates(loader, epochs=EPOCHS)
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error", HastenWarning)
        model, optimizer, schedule = accelerator.prepare(net, optimizer, schedule)
    assert train(accelerator, model, optimizer, schedule, loader) == 0.0


@ranks(1, 2)
@pytest.mark.parametrize("first", [False, True], ids=["at once", "loader first"])
def test_a_length_in_batches_is_reported_at_the_users_line(
    ctx: ProcessContext, first: bool
) -> None:
    accelerator, net, optimizer, loader = parts(2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if first:
            loader = accelerator.prepare(loader)
        schedule = LinearLR(optimizer, 1.0, 0.0, total_iters=len(loader) * EPOCHS)
        accelerator.prepare(net, optimizer, schedule, loader)
    own_warnings = [
        caught_warning
        for caught_warning in caught
        if issubclass(caught_warning.category, HastenWarning)
    ]
    assert len(own_warnings) == ctx.is_main
    for warning in own_warnings:
        assert "accelerator.num_updates(loader, epochs=2)" in str(warning.message)
        assert Path(warning.filename).name == Path(__file__).name
