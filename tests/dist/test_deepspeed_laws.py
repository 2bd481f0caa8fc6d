"""DeepSpeed's engines train as DDP does: every ZeRO stage, precision and window, on one process and on several."""

from __future__ import annotations

from typing import Any, Final

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from hasten import Accelerator
from hasten.errors import CheckpointError, PrepareError, StepError
from hasten.optional import available
from hasten.runtime.context import ProcessContext
from hasten.strategies.deepspeed_engine import VERSIONS
from hasten.testing.pool import ranks

pytestmark = pytest.mark.skipif(
    not available("deepspeed", VERSIONS),
    reason=f"deepspeed{VERSIONS} is not installed (pip install 'hasten[deepspeed]')",
)

STEPS: Final = 20
SMALL: Final = {"reduce_bucket_size": 1000, "stage3_param_persistence_threshold": 8}
"""Buckets that hold less than the model, and a bias that ZeRO-3 keeps whole."""


def samples(length: int = 32) -> list[tuple[Tensor, Tensor]]:
    rng = torch.Generator().manual_seed(3)
    x = torch.randn(length, 6, generator=rng)
    return list(zip(x, torch.sin(x.sum(1, keepdim=True)), strict=True))


def net(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 7), nn.Tanh(), nn.Linear(7, 1))


def engine(stage: int, **zero: Any) -> dict[str, Any]:
    return {
        "strategy": "deepspeed",
        "deepspeed": {"hf_ds_config": {"zero_optimization": {"stage": stage, **SMALL, **zero}}},
    }


class Run:
    """One training, step by step; the script is the same for every strategy."""

    def __init__(self, accelerator: Accelerator, clip: float | None = None, length: int = 32) -> None:
        self.accelerator, self.clip = accelerator, clip
        model = net()
        groups = [
            {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": 0.1},
            {"params": [p for p in model.parameters() if p.ndim == 1], "weight_decay": 0.0},
        ]
        optimizer = torch.optim.AdamW(groups, lr=2e-2)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step / 10))
        loader: DataLoader[Any] = DataLoader(samples(length), batch_size=4)  # type: ignore[arg-type]
        self.model, self.optimizer, self.schedule, self.loader = accelerator.prepare(model, optimizer, schedule, loader)
        self.losses: list[float] = []
        self.norms: list[float] = []
        self.updates: list[int] = []

    def steps(self, number: int) -> None:
        done = 0
        while True:
            for x, y in self.loader:
                if done == number:
                    return
                done += 1
                self.step(x, y)

    def step(self, x: Tensor, y: Tensor) -> None:
        accelerator = self.accelerator
        with accelerator.accumulate(self.model):
            loss = nn.functional.mse_loss(self.model(x), y)
            accelerator.backward(loss)
            if self.clip is not None:
                norm = accelerator.clip_grad_norm_(self.model.parameters(), self.clip)
                self.norms += [] if norm is None else [float(norm)]
            self.optimizer.step()
            self.schedule.step()
            self.optimizer.zero_grad()
        self.losses.append(float(accelerator.reduce(loss.detach(), "mean")))
        self.updates.append(self.optimizer.num_updates)

    @property
    def weights(self) -> Tensor:
        state = self.accelerator.get_state_dict(self.model)
        return torch.cat([value.float().flatten() for value in state.values()])


def trained(settings: dict[str, Any], steps: int = STEPS, **kwargs: Any) -> Run:
    run = Run(Accelerator(**settings), **kwargs)
    run.steps(steps)
    return run


@ranks(1, 2)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_every_stage_trains_like_ddp(ctx: ProcessContext, stage: int) -> None:
    """The windows of three do not divide the epoch: its last one is shorter, and its mean must be one all the same.

    fp32: sums in another order, over 20 steps of Adam. bf16: DDP rounds activations, an engine the weights as well.
    """
    for precision, tolerance in (("no", 2e-6), ("bf16", 3e-2)):
        for every in (1, 3):
            common = {"mixed_precision": precision, "gradient_accumulation_steps": every}
            plain = trained({**common, "strategy": "ddp" if ctx.world.size > 1 else "none"})
            ours = trained({**common, **engine(stage)})
            label = f"{precision}, accumulation {every}"
            assert ours.updates == plain.updates, label
            torch.testing.assert_close(
                torch.tensor(ours.losses), torch.tensor(plain.losses), rtol=0, atol=tolerance, msg=label
            )
            torch.testing.assert_close(ours.weights, plain.weights, rtol=0, atol=tolerance, msg=label)


@ranks(1, 2)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_the_loop_clips(ctx: ProcessContext, stage: int) -> None:
    """clip_grad_norm_ gives the norm that DDP gives, and what it clips to wins over DeepSpeed's own number."""
    common = {"gradient_accumulation_steps": 2}
    plain = trained({**common, "strategy": "ddp" if ctx.world.size > 1 else "none"}, 8, clip=0.05)
    settings = engine(stage)
    settings["deepspeed"]["hf_ds_config"]["gradient_clipping"] = 1.0
    ours = trained({**common, **settings}, 8, clip=0.05)
    torch.testing.assert_close(torch.tensor(ours.norms), torch.tensor(plain.norms), rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(ours.weights, plain.weights, rtol=0, atol=2e-6)
    alone = engine(stage)
    alone["deepspeed"]["hf_ds_config"]["gradient_clipping"] = 0.05
    torch.testing.assert_close(trained({**common, **alone}, 8).weights, plain.weights, rtol=0, atol=2e-6)


@ranks(2)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_offload_to_the_cpu_changes_no_number(ctx: ProcessContext, stage: int) -> None:
    zero = {"offload_optimizer": {"device": "cpu"}} | ({"offload_param": {"device": "cpu"}} if stage == 3 else {})
    common = {"gradient_accumulation_steps": 3}
    plain = trained({**common, "strategy": "ddp"}, 11, clip=0.5)
    ours = trained({**common, **engine(stage, **zero)}, 11, clip=0.5)
    torch.testing.assert_close(torch.tensor(ours.norms), torch.tensor(plain.norms), rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(ours.weights, plain.weights, rtol=0, atol=2e-6)
