"""What a script saves through DeepSpeed's own `engine.save_checkpoint` resumes to the run that never stopped, with the loop's schedule."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import pytest
import torch
from torch import Tensor, nn

from hasten import Accelerator, DummyOptim, DummyScheduler
from hasten.extensions.deepspeed.engine import VERSIONS
from hasten.optional import available
from hasten.runtime.context import ProcessContext
from hasten.testing.pool import ranks

PRELOAD: Final = ("deepspeed",)

pytestmark = pytest.mark.skipif(
    not available("deepspeed", VERSIONS),
    reason=f"deepspeed{VERSIONS} is not installed (pip install 'hasten[deepspeed]')",
)

ENGINE_OPTIMIZER = {
    "optimizer": {"type": "AdamW", "params": {"lr": 2e-2, "torch_adam": True}},
    "scheduler": {
        "type": "WarmupLR",
        "params": {
            "warmup_max_lr": 2e-2,
            "warmup_num_steps": 6,
            "warmup_type": "linear",
        },
    },
}


class Run:
    """A training whose optimizer and schedule are the script's, or made by DeepSpeed."""

    def __init__(
        self, ctx: ProcessContext, stage: int, precision: str, by_engine: bool
    ) -> None:
        config = {
            "zero_optimization": {"stage": stage},
            **(ENGINE_OPTIMIZER if by_engine else {}),
        }
        self.accelerator = Accelerator(
            strategy="deepspeed",
            mixed_precision=precision,
            gradient_accumulation_steps=2,
            deepspeed_plugin={"hf_ds_config": config},
        )
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))
        optimizer: Any = (
            DummyOptim(model.parameters(), lr=2e-2)
            if by_engine
            else torch.optim.AdamW(model.parameters(), lr=2e-2)
        )
        schedule: Any = (
            DummyScheduler(optimizer, warmup_num_steps=6)
            if by_engine
            else torch.optim.lr_scheduler.LambdaLR(
                optimizer, lambda step: 1.0 / (1 + step)
            )
        )
        self.model, self.optimizer, self.schedule = self.accelerator.prepare(
            model, optimizer, schedule
        )
        self.rank = ctx.world.rank
        self.rates: list[float] = []
        self.losses: list[float] = []

    def passes(self, first: int, last: int) -> None:
        for number in range(first, last):
            x = torch.randn(
                4, 6, generator=torch.Generator().manual_seed(10 * number + self.rank)
            )
            with self.accelerator.accumulate(self.model):
                loss = (self.model(x).float() - x.sum(1, keepdim=True)).square().mean()
                self.accelerator.backward(loss)
                self.rates.append(self.schedule.get_last_lr()[0])
                self.optimizer.step()
                self.schedule.step()
                self.optimizer.zero_grad()
            self.losses.append(loss.item())

    @property
    def weights(self) -> list[Tensor]:
        return list(self.accelerator.get_state_dict(self.model).values())


@ranks(2, exhaustive=(1, 3))
@pytest.mark.parametrize("engine_builds", [False, True])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_resume_is_the_run_that_never_stopped(
    ctx: ProcessContext, tmp_path: Path, stage: int, engine_builds: bool
) -> None:
    for precision in ("no", "bf16") if stage == 2 else ("no",):
        folder = str(tmp_path / precision)
        uninterrupted = Run(ctx, stage, precision, engine_builds)
        uninterrupted.passes(0, 6)
        uninterrupted.model.save_checkpoint(folder, tag="here")
        uninterrupted.passes(6, 12)

        resumed = Run(ctx, stage, precision, engine_builds)
        resumed.passes(20, 24)  # other weights, moments and rates
        path, _ = resumed.model.load_checkpoint(folder, tag="here")
        assert path is not None
        resumed.rates.clear()
        resumed.losses.clear()
        resumed.passes(6, 12)

        assert resumed.losses == uninterrupted.losses[6:], precision
        assert resumed.rates == uninterrupted.rates[6:], precision
        assert len(set(uninterrupted.rates)) > 4, (
            "the schedule must move, or the test shows nothing"
        )
        for resumed_weight, expected_weight in zip(
            resumed.weights, uninterrupted.weights, strict=True
        ):
            assert torch.equal(resumed_weight, expected_weight), precision


@ranks(1)
@pytest.mark.parametrize("stage", [1, 3])
def test_an_open_window_is_dropped_at_a_load(
    ctx: ProcessContext, tmp_path: Path, stage: int
) -> None:
    run = Run(ctx, stage, "no", by_engine=False)
    run.passes(0, 2)
    run.model.save_checkpoint(str(tmp_path), tag="before")
    run.passes(2, 3)
    num_updates = run.optimizer.num_updates
    run.model.load_checkpoint(str(tmp_path), tag="before")
    loaded_weights = [weight.clone() for weight in run.weights]
    run.optimizer.optimizer.step()  # there is nothing left to apply
    assert run.optimizer.num_updates == num_updates
    assert all(
        torch.equal(a, b) for a, b in zip(run.weights, loaded_weights, strict=True)
    )
