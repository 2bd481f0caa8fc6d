"""Epoch loops on several ranks: resumed on the same number, on another number, and after a run that went back."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from hasten import Accelerator
from hasten.runtime.context import ProcessContext
from hasten.testing.pool import Pool, ranks

ROWS = 16


class Rows(Dataset[torch.Tensor]):
    """Numbers; row 5 is nan in the epoch `bad`."""

    def __init__(self, bad: int | None = None) -> None:
        self.bad, self.epoch = bad, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(
            [math.nan if index == 5 and self.epoch == self.bad else index, index],
            dtype=torch.float,
        )


def make(
    ctx: ProcessContext, folder: Path, bad: int | None = None, **settings: Any
) -> tuple[Accelerator, Any]:
    torch.manual_seed(3)
    accelerator = Accelerator(context=ctx, project_dir=str(folder), **settings)
    model = nn.Linear(1, 1)
    prepared = accelerator.prepare(
        model,
        torch.optim.SGD(model.parameters(), lr=1e-4),
        DataLoader(Rows(bad), batch_size=2, shuffle=True),
    )
    return accelerator, prepared


def train(
    accelerator: Accelerator,
    prepared: Any,
    epochs: int,
    save_at: tuple[int, ...] = (),
    stop: bool = False,
) -> list[tuple[int, int, list[int]]]:
    """The epoch, the loader's epoch and the samples of every step; saves after these steps, and stops at the last of them."""
    model, optimizer, loader = prepared
    steps: list[tuple[int, int, list[int]]] = []
    for epoch in accelerator.epochs(epochs):
        for batch in accelerator.progress(loader, every_s=1e9):
            accelerator.backward(model(batch[:, :1]).square().mean())
            optimizer.step()
            optimizer.zero_grad()
            steps.append((epoch, loader.epoch, batch[:, 1].int().tolist()))
            if len(steps) in save_at:
                accelerator.save_state()
                if stop and len(steps) == max(save_at):
                    return steps
    return steps


@ranks(2, exhaustive=(1, 3))
# inside an epoch, at the last batch of one, in the next
@pytest.mark.parametrize("stop_at", [3, 4, 6])
def test_a_resumed_loop_goes_on_in_its_epoch(
    ctx: ProcessContext, tmp_path: Path, stop_at: int
) -> None:
    uninterrupted = train(*make(ctx, tmp_path / "whole"), 3)
    first = train(*make(ctx, tmp_path / "run"), 3, (stop_at,), stop=True)
    accelerator, prepared = make(ctx, tmp_path / "run")
    accelerator.load_state()
    assert [*first, *train(accelerator, prepared, 3)] == uninterrupted


def first_part(
    ctx: ProcessContext, folder: Path, steps: int
) -> list[tuple[int, int, list[int]]]:
    return train(*make(ctx, folder), 3, (steps,), stop=True)


def second_part(
    ctx: ProcessContext, folder: Path
) -> tuple[list[tuple[int, int, list[int]]], int, int]:
    accelerator, prepared = make(ctx, folder)
    accelerator.load_state()
    return train(accelerator, prepared, 3), prepared[2].num_done, len(prepared[2])


@pytest.mark.parametrize(("old", "new"), [(2, 1), (1, 2), (2, 4)])
@pytest.mark.parametrize("inside", [True, False])
def test_every_sample_of_every_epoch_once_on_another_number_of_processes(
    rank_pool: Pool, tmp_path: Path, old: int, new: int, inside: bool
) -> None:
    per_epoch = ROWS // (2 * old)
    first = rank_pool.run(
        first_part, old, tmp_path, per_epoch + (per_epoch // 2 if inside else 0)
    )
    second = rank_pool.run(second_part, new, tmp_path)
    steps = [step for rank_steps in first for step in rank_steps] + [
        step for rank_steps, _, _ in second for step in rank_steps
    ]
    for epoch in range(3):
        assert sorted(
            row for number, _, rows in steps if number == epoch for row in rows
        ) == list(range(ROWS))
    assert {epoch for rank_steps, _, _ in second for epoch, _, _ in rank_steps} == (
        {1, 2}
    )
