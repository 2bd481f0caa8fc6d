"""A torch that hides what exact resumes need: saving and loading go on, and say what they cannot keep."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from hasten import Accelerator
from hasten.config.sections.parallel import FullyShardedDataParallelPlugin
from hasten.errors import CheckpointError
from hasten.runtime.context import ProcessContext
from hasten.testing.pool import ranks


@contextmanager
def without(owner: Any, name: str) -> Iterator[None]:
    kept = owner.__dict__[name]
    delattr(owner, name)
    try:
        yield
    finally:
        setattr(owner, name, kept)


class Heard(logging.Handler):
    """Warnings of hasten."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


@contextmanager
def hearing() -> Iterator[list[str]]:
    heard = Heard()
    logging.getLogger("hasten").addHandler(heard)
    try:
        yield heard.lines
    finally:
        logging.getLogger("hasten").removeHandler(heard)


def make(ctx: ProcessContext, folder: Path, sharded: bool) -> tuple[Accelerator, Any, Any]:
    torch.manual_seed(1)
    settings: dict[str, Any] = {}
    if sharded:
        settings = {"strategy": "fsdp", "fsdp_plugin": FullyShardedDataParallelPlugin()}
    accelerator = Accelerator(context=ctx, project_dir=str(folder), gradient_accumulation_steps=2, **settings)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))
    return accelerator, *accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.01))


def train(run: tuple[Accelerator, Any, Any], first: int, last: int) -> None:
    accelerator, model, optimizer = run
    for number in range(first, last):
        generator = torch.Generator().manual_seed(10 * number + accelerator.process_index)
        with accelerator.accumulate(model):
            accelerator.backward(model(torch.randn(3, 4, generator=generator)).pow(2).mean())
            optimizer.step()
            optimizer.zero_grad()


def weights(run: tuple[Accelerator, Any, Any]) -> list[torch.Tensor]:
    found = list(run[0].unwrap_model(run[1]).parameters())
    return [(p.to_local() if hasattr(p, "to_local") else p).detach().clone() for p in found]


def resumed_like_uninterrupted(ctx: ProcessContext, folder: Path, sharded: bool, stop: int) -> list[str]:
    """Interrupted and uninterrupted runs agree to the tolerance that is promised; what was logged."""
    whole = make(ctx, folder, sharded)
    train(whole, 0, 8)
    with hearing() as lines:
        first = make(ctx, folder, sharded)
        train(first, 0, stop)
        first[0].save_state(str(folder / "x"))
        first[0].save_state(str(folder / "x"))
        second = make(ctx, folder, sharded)
        second[0].load_state(str(folder / "x"))
        train(second, stop, 8)
    for a, b in zip(weights(second), weights(whole), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    return lines


@ranks(2, 3)
def test_without_the_order_of_buckets(ctx: ProcessContext, tmp_path: Path) -> None:
    with without(DistributedDataParallel, "_get_ddp_logging_data"):
        lines = resumed_like_uninterrupted(ctx, tmp_path, False, 3)
    told = [line for line in lines if "cannot store the order in which it buckets gradients" in line]
    assert len(told) == (2 if ctx.rank == 0 else 0), "once by each accelerator, on the main process"
    assert all("_get_ddp_logging_data" in line and "1e-6" in line for line in told)


@ranks(2, mesh={"dp_shard": -1})
def test_without_the_gradients_that_fsdp_holds(ctx: ProcessContext, tmp_path: Path) -> None:
    with without(FSDPModule, "_get_fsdp_state"):
        lines = resumed_like_uninterrupted(ctx, tmp_path, True, 3)
    told = [line for line in lines if "_get_fsdp_state" in line]
    assert len(told) == (2 if ctx.rank == 0 else 0)


@ranks(4, mesh={"dp_shard": 2, "dp_replicate": 2})
def test_a_window_that_would_be_lost_is_not_saved(ctx: ProcessContext, tmp_path: Path) -> None:
    run = make(ctx, tmp_path, True)
    train(run, 0, 3)
    with (
        without(FSDPModule, "_get_fsdp_state"),  # torch itself needs it to train
        pytest.raises(CheckpointError, match="Save at the end of a window"),
    ):
        run[0].save_state(str(tmp_path / "x"))
    train(run, 3, 4)
    run[0].save_state(str(tmp_path / "x"))
