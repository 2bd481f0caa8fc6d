"""Resuming on another number of processes: tensors reshard, no sample is lost or repeated, random state is derived."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from hasten import Accelerator
from hasten.runtime.context import ProcessContext
from hasten.testing.pool import Pool

ROWS = 48


def make(
    ctx: ProcessContext, folder: Path, every: int
) -> tuple[Accelerator, Any, Any, Any]:
    torch.manual_seed(7)
    accelerator = Accelerator(
        context=ctx, project_dir=str(folder), gradient_accumulation_steps=every
    )
    model = nn.Linear(1, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    data = TensorDataset(torch.arange(float(ROWS)).reshape(-1, 1))
    return accelerator, *accelerator.prepare(
        model, optimizer, DataLoader(data, batch_size=2, shuffle=True)
    )


def train_some(
    ctx: ProcessContext, folder: Path, every: int, batches: int
) -> list[int]:
    """Some batches of the first epoch, then a checkpoint; the samples seen."""
    accelerator, model, optimizer, loader = make(ctx, folder, every)
    read_samples: list[int] = []
    for (x,) in loader:
        read_samples += x.flatten().int().tolist()
        with accelerator.accumulate(model):
            accelerator.backward(model(x).mean())
            optimizer.step()
            optimizer.zero_grad()
        if len(read_samples) == 2 * batches:
            break
    accelerator.save_state()
    return read_samples


def train_rest(
    ctx: ProcessContext, folder: Path, every: int
) -> tuple[list[int], float, float]:
    """The rest of the epoch; the samples seen, a random number drawn right after loading, and the weight."""
    accelerator, model, optimizer, loader = make(ctx, folder, every)
    accelerator.load_state()
    drawn = float(torch.rand(()))
    read_samples: list[int] = []
    for (x,) in loader:
        read_samples += x.flatten().int().tolist()
        with accelerator.accumulate(model):
            accelerator.backward(model(x).mean())
            optimizer.step()
            optimizer.zero_grad()
    return read_samples, drawn, float(next(model.parameters()).detach())


@pytest.mark.parametrize(("old", "new"), [(1, 2), (2, 1), (2, 4), (4, 2)])
def test_every_sample_once_on_another_number_of_processes(
    rank_pool: Pool, tmp_path: Path, old: int, new: int
) -> None:
    batches = 12 // old
    first = rank_pool.run(train_some, old, tmp_path, 1, batches)
    second = rank_pool.run(train_rest, new, tmp_path, 1)
    read_samples = [sample for rank_samples in first for sample in rank_samples] + [
        sample for rank_samples, _, _ in second for sample in rank_samples
    ]
    assert sorted(read_samples) == list(range(ROWS)), "no loss, no repeat"
    drawn = [number for _, number, _ in second]
    assert len(set(drawn)) == new, "ranks draw different numbers"
    repeated = rank_pool.run(train_rest, new, tmp_path, 1)
    assert [number for _, number, _ in repeated] == drawn, (
        "derived from (seed, rank, step), so always the same"
    )


@pytest.mark.parametrize(("old", "new"), [(2, 1), (2, 4)])
def test_an_open_window_begins_anew_on_the_new_processes(
    rank_pool: Pool, tmp_path: Path, old: int, new: int
) -> None:
    """Two of four micro-steps on the old processes are repeated on the new ones: the step is the mean of theirs."""
    rank_pool.run(train_some, old, tmp_path, 4, 2)
    second = rank_pool.run(train_rest, new, tmp_path, 4)
    torch.manual_seed(7)
    start = float(nn.Linear(1, 1, bias=False).weight.detach())
    steps = len(second[0][0]) // 2
    micro = [
        [sum(rank_samples[2 * i : 2 * i + 2]) / 2 for rank_samples, _, _ in second]
        for i in range(steps)
    ]
    means = [sum(ranks) / len(ranks) for ranks in micro]
    windows = [means[i : i + 4] for i in range(0, len(means), 4)]
    expected = start - 1e-3 * sum(sum(window) / len(window) for window in windows)
    assert sorted(
        sample for rank_samples, _, _ in second for sample in rank_samples
    ) == list(range(ROWS))
    assert second[0][2] == pytest.approx(expected, rel=1e-5)


def test_the_change_of_world_is_said(rank_pool: Pool, tmp_path: Path) -> None:
    rank_pool.run(train_some, 2, tmp_path, 1, 2)
    messages = rank_pool.run(_warnings_of_loading, 1, tmp_path)[0]
    assert any("saved by 2 processes and is loaded by 1" in line for line in messages)


def _warnings_of_loading(ctx: ProcessContext, folder: Path) -> list[str]:
    lines: list[str] = []

    class Collector(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    handler = Collector(logging.WARNING)
    logging.getLogger("hasten").addHandler(handler)
    try:
        make(ctx, folder, 1)[0].load_state()
    finally:
        logging.getLogger("hasten").removeHandler(handler)
    return lines
