"""Resuming on another number of processes: each sample is trained on once an epoch, and the schedule ends with the data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, TensorDataset

from hasten import Accelerator
from hasten.runtime.context import ProcessContext
from hasten.testing.pool import Pool
from hasten.trainer import get_scheduler

NUM_SAMPLES, NUM_EPOCHS = 61, 3


def make_schedule(
    kind: str, optimizer: torch.optim.Optimizer, length: int
) -> Any:  # Any: schedulers share no base class
    match kind:
        case "linear":
            return lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=length)
        case "cosine":
            return lr_scheduler.CosineAnnealingLR(optimizer, T_max=length)
        case "one_cycle":
            return lr_scheduler.OneCycleLR(optimizer, 1.0, total_steps=length + 1)
        case _:
            return get_scheduler("linear", optimizer, 0, length)


def train(
    ctx: ProcessContext, folder: Path, kind: str, every: int, num_updates: int
) -> tuple[list[int], float]:
    """Train for `num_updates` updates from the newest checkpoint; return this rank's samples and the learning rate."""
    accelerator = Accelerator(
        context=ctx, project_dir=str(folder), gradient_accumulation_steps=every
    )
    model: Any = nn.Linear(1, 1, bias=False)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=1.0)
    data = TensorDataset(torch.arange(float(NUM_SAMPLES)).reshape(-1, 1))
    loader: Any = accelerator.prepare(DataLoader(data, batch_size=4, shuffle=True))
    schedule = make_schedule(kind, optimizer, NUM_EPOCHS * -(-len(loader) // every))
    model, optimizer, schedule = accelerator.prepare(model, optimizer, schedule)
    accelerator.load_state(must_exist=False)
    samples: list[int] = []
    for _ in accelerator.epochs(NUM_EPOCHS):
        for (x,) in loader:
            real = loader.cursor.num_real
            samples += x.flatten().int().tolist()[:real]
            with accelerator.accumulate(model):
                accelerator.backward(0.0 * model(x).mean())
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            num_updates -= accelerator.sync_gradients
            if num_updates == 0:
                accelerator.save_state()
                return samples, optimizer.param_groups[0]["lr"]
    return samples, optimizer.param_groups[0]["lr"]


@pytest.mark.parametrize(
    ("kind", "worlds", "every"),
    [
        ("linear", ((1, 24), (2, -1)), 1),
        ("cosine", ((2, 12), (1, -1)), 1),
        ("one_cycle", ((2, 11), (1, 7), (2, -1)), 1),
        ("lambda", ((3, 1), (1, 9), (2, -1)), 1),
        ("linear", ((1, 16), (3, 3), (2, -1)), 1),
        ("lambda", ((1, 5), (2, -1)), 2),
    ],
)
def test_the_schedule_ends_with_the_last_epoch(
    rank_pool: Pool,
    tmp_path: Path,
    kind: str,
    worlds: tuple[tuple[int, int], ...],
    every: int,
) -> None:
    samples: list[int] = []
    rates: list[float] = []
    for world, num_updates in worlds:
        for rank_samples, rate in rank_pool.run(
            train, world, tmp_path, kind, every, num_updates
        ):
            samples += rank_samples
            rates.append(rate)
    assert sorted(samples) == sorted(NUM_EPOCHS * list(range(NUM_SAMPLES))), (
        "each sample once an epoch"
    )
    assert rates[-1] == pytest.approx(0.0, abs=1e-3), "the schedule ended"
