"""An interrupted run ends bitwise equal to one that was not: any interruption point, on 1, 2 and 4 processes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from hasten import Accelerator
from hasten.config.sections.parallel import FullyShardedDataParallelPlugin
from hasten.runtime.context import ProcessContext
from hasten.testing.pool import ranks

ROWS = 40


class Stream(IterableDataset[tuple[Tensor, Tensor]]):
    """The same rows as a stream."""

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        x, y = rows()
        yield from zip(x, y, strict=True)


class Numbered(TensorDataset):
    """A dataset whose items draw random numbers, as augmentations do."""

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        x, y = (tensor[index] for tensor in self.tensors)
        return x + 0.01 * torch.randn(x.shape), y


def rows() -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(3)
    return torch.randn(ROWS, 6, generator=g), torch.randn(ROWS, 1, generator=g)


@dataclass
class Case:
    """One way to train."""

    every: int = 1
    precision: str = "no"
    data: str = "shuffled"
    workers: int = 0
    sharded: bool = False
    steps: int = 13


@dataclass
class Run:
    """A run from scratch, and what it has seen."""

    case: Case
    ctx: ProcessContext
    folder: Path
    losses: list[float] = field(default_factory=list)
    complete: int = 0
    """Number of micro-steps in complete windows."""

    def __post_init__(self) -> None:
        torch.manual_seed(11)
        settings: dict[str, Any] = {}
        if self.case.sharded:
            settings |= {
                "strategy": "fsdp",
                "fsdp_plugin": FullyShardedDataParallelPlugin(),
            }
        self.accelerator = Accelerator(
            context=self.ctx,
            gradient_accumulation_steps=self.case.every,
            mixed_precision=self.case.precision,
            project_dir=str(self.folder),
            **settings,
        )
        model = nn.Sequential(
            nn.Linear(6, 8),
            nn.Dropout(0.3),
            nn.BatchNorm1d(8),
            nn.ReLU(),
            nn.Linear(8, 1),
        )
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-2)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-2, total_steps=61)
        self.model, self.optimizer, self.scheduler, self.loader = (
            self.accelerator.prepare(model, optimizer, scheduler, self._loader())
        )

    def _loader(self) -> DataLoader[Any]:
        options: dict[str, Any] = {"batch_size": 2, "num_workers": self.case.workers}
        if self.case.workers:
            options["multiprocessing_context"] = "fork"
        if self.case.data == "stream":
            return DataLoader(Stream(), **options)
        return DataLoader(Numbered(*rows()), shuffle=True, **options)

    def train(self, until: int) -> None:
        """Go on to so many micro-steps, through as many epochs as it takes."""
        accelerator = self.accelerator
        while len(self.losses) < until:
            for x, y in self.loader:
                with accelerator.accumulate(self.model):
                    loss = (self.model(x) - y).pow(2).mean()
                    accelerator.backward(loss)
                    if accelerator.sync_gradients:
                        accelerator.clip_grad_norm_(self.model.parameters(), 1.0)
                    self.optimizer.step()
                    self.scheduler.step()
                    self.optimizer.zero_grad()
                self.losses.append(float(loss.detach()))
                if accelerator.sync_gradients:
                    self.complete = len(self.losses)
                if len(self.losses) >= until:
                    return

    def fingerprint(self) -> list[Tensor]:
        """Everything that must be equal."""
        tensors = [
            t.detach().clone()
            for t in self.accelerator.unwrap_model(self.model).state_dict().values()
        ]
        for values in self.optimizer.state.values():
            tensors += [v.clone() for v in values.values()]
        tensors.append(
            torch.tensor([group["lr"] for group in self.optimizer.param_groups])
        )
        return [t.to_local() if hasattr(t, "to_local") else t for t in tensors]


def interrupted_equals_uninterrupted(
    ctx: ProcessContext, folder: Path, case: Case, stops: list[int]
) -> None:
    uninterrupted = Run(case, ctx, folder / "whole")
    uninterrupted.train(case.steps)
    for stop in stops:
        first = Run(case, ctx, folder / f"at{stop}")
        first.train(stop)
        first.accelerator.save_state(blocking=stop % 2 == 0)
        first.accelerator.end_training()
        assert stop - first.complete < case.every, (
            "at most a window's micro-steps but the last are repeated"
        )
        second = Run(
            case, ctx, folder / f"at{stop}", losses=first.losses[: first.complete]
        )
        # whatever happened before loading must not matter
        torch.manual_seed(999 + ctx.rank)
        second.accelerator.load_state()
        second.train(case.steps)
        assert second.losses == uninterrupted.losses, (
            f"stopped at {stop}: {second.losses} instead of {uninterrupted.losses}"
        )
        for a, b in zip(second.fingerprint(), uninterrupted.fingerprint(), strict=True):
            assert torch.equal(a, b), f"stopped at {stop}: {a} instead of {b}"
        assert second.optimizer.num_updates == uninterrupted.optimizer.num_updates
        second.accelerator.end_training()


@ranks(2, exhaustive=(1, 4))
def test_any_interruption_point_with_accumulation_and_shuffling(
    ctx: ProcessContext, tmp_path: Path
) -> None:
    stops = list(range(1, 13)) if ctx.world.size == 2 else [1, 5, 10, 11]
    interrupted_equals_uninterrupted(ctx, tmp_path, Case(every=3), stops)


@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize("precision", ["fp16", "bf16"])
@ranks(2, exhaustive=(1,))
def test_low_precision_with_its_scaler(
    ctx: ProcessContext, tmp_path: Path, every: int, precision: str
) -> None:
    interrupted_equals_uninterrupted(
        ctx, tmp_path, Case(every=every, precision=precision), [2, 7]
    )


@ranks(1, 2, exhaustive=(4,))
def test_streams(ctx: ProcessContext, tmp_path: Path) -> None:
    interrupted_equals_uninterrupted(
        ctx, tmp_path, Case(every=2, data="stream"), [3, 8]
    )


@pytest.mark.parametrize("data", ["shuffled", "stream"])
@ranks(2, timeout_s=110, exhaustive=(1,))
def test_workers(ctx: ProcessContext, tmp_path: Path, data: str) -> None:
    interrupted_equals_uninterrupted(
        ctx, tmp_path, Case(data=data, workers=2, steps=12), [3, 8]
    )


@ranks(2, mesh={"dp_shard": -1}, exhaustive=(4,))
def test_sharded(ctx: ProcessContext, tmp_path: Path) -> None:
    interrupted_equals_uninterrupted(ctx, tmp_path, Case(every=3, sharded=True), [3, 7])


@ranks(4, mesh={"dp_shard": 2, "dp_replicate": 2})
def test_sharded_and_replicated(ctx: ProcessContext, tmp_path: Path) -> None:
    interrupted_equals_uninterrupted(ctx, tmp_path, Case(every=3, sharded=True), [4, 6])
