"""A run that returns to a checkpoint in the same process repeats its steps bit for bit, whatever DDP has done to its buckets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hasten import Accelerator, DistributedDataParallelKwargs
from hasten.runtime.context import ProcessContext
from hasten.testing.pool import ranks


class Backwards(nn.Module):
    """Uses its layers in another order than they are defined in, so that DDP packs them anew after the first step."""

    def __init__(self, turned: bool = True) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(37, 37) for _ in range(5))
        self.order = [3, 0, 4, 1, 2] if turned else [2, 1, 0, 3, 4]

    def forward(self, x: Tensor) -> Tensor:
        for index in self.order:
            x = torch.tanh(self.layers[index](x))
        return x.pow(2).mean()


class Run:
    """A model under DDP and a fixed series of steps."""

    def __init__(self, ctx: ProcessContext, **options: Any) -> None:
        self.rank = ctx.rank
        self.accelerator = Accelerator(
            context=ctx,
            kwargs_handlers=[
                DistributedDataParallelKwargs(bucket_cap_mb=0.012, **options)
            ],
        )
        torch.manual_seed(0)
        net = Backwards()
        self.model, self.optimizer = self.accelerator.prepare(
            net, torch.optim.AdamW(net.parameters(), lr=0.01)
        )

    def step(self, number: int) -> None:
        g = torch.Generator().manual_seed(100 * number + self.rank)
        self.accelerator.backward(self.model(torch.randn(4, 37, generator=g)))
        self.optimizer.step()
        self.optimizer.zero_grad()

    def train(self, first: int, last: int) -> list[Tensor]:
        """The weights after each step."""
        weights_by_step = []
        for number in range(first, last):
            self.step(number)
            weights_by_step.append(
                torch.cat(
                    [p.detach().flatten().clone() for p in self.model.parameters()]
                )
            )
        return weights_by_step


def equal(a: list[Tensor], b: list[Tensor]) -> None:
    for number, (x, y) in enumerate(zip(a, b, strict=True)):
        assert torch.equal(x, y), f"step {number}: {(x - y).abs().max()}"


@ranks(3, exhaustive=(4,))
@pytest.mark.parametrize(
    "options", [{}, {"gradient_as_bucket_view": True}], ids=["copies", "views"]
)
def test_a_return_to_before_the_first_update_is_bitwise(
    ctx: ProcessContext, tmp_path: Path, options: dict[str, Any]
) -> None:
    run = Run(ctx, **options)
    run.accelerator.save_state(str(tmp_path / "start"))
    uninterrupted = run.train(0, 4)
    run.accelerator.load_state(str(tmp_path / "start"))
    equal(run.train(0, 1), uninterrupted[:1])
    # after one step, when DDP has not packed anew yet
    run.accelerator.load_state(str(tmp_path / "start"))
    equal(run.train(0, 2), uninterrupted[:2])
    run.accelerator.save_state(str(tmp_path / "later"))
    equal(run.train(2, 4), uninterrupted[2:])
    run.accelerator.load_state(str(tmp_path / "later"))
    equal(run.train(2, 4), uninterrupted[2:])
    run.accelerator.load_state(str(tmp_path / "start"))
    equal(run.train(0, 4), uninterrupted)
    fresh = Run(ctx, **options)
    fresh.accelerator.load_state(str(tmp_path / "start"))
    equal(fresh.train(0, 4), uninterrupted)


@ranks(3)
def test_an_order_of_another_run_is_taken_over(
    ctx: ProcessContext, tmp_path: Path
) -> None:
    """Also by a model that has an order already, which the checkpoint's replaces."""
    first = Run(ctx)
    first.train(0, 2)
    first.accelerator.save_state(str(tmp_path / "a"))
    uninterrupted = first.train(2, 4)
    second = Run(ctx)
    second.model.module.order = [2, 1, 0, 3, 4]
    second.train(0, 2)
    second.model.module.order = [3, 0, 4, 1, 2]
    second.accelerator.load_state(str(tmp_path / "a"))
    equal(second.train(2, 4), uninterrupted)


@ranks(3)
def test_one_step_after_the_other_without_the_first_buckets(
    ctx: ProcessContext, tmp_path: Path
) -> None:
    """What does not pack anew is left alone."""
    run = Run(ctx, find_unused_parameters=True)
    first_reducer = run.model.reducer
    run.accelerator.save_state(str(tmp_path / "start"))
    uninterrupted = run.train(0, 3)
    run.accelerator.load_state(str(tmp_path / "start"))
    equal(run.train(0, 3), uninterrupted)
    assert run.model.reducer is first_reducer
