"""Checkpoints of models with quantized weights: saved, loaded and resharded on one process, under DDP and under FSDP2."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import pytest
import torch
from torch import Tensor, nn

from hasten import Accelerator, quantize_weights
from hasten.optional import available
from hasten.runtime.context import ProcessContext
from hasten.testing.pool import ranks

WIDTH: Final = 128
KINDS: Final = {
    "int8": "torchao",
    "int4": "torchao",
    "nf4": "bitsandbytes",
    "fp4": "bitsandbytes",
}
pytestmark = pytest.mark.exhaustive  # importing torchao and bitsandbytes takes long


class AdaptedLayer(nn.Module):
    """Frozen quantized layer with a trained correction of low rank."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH)
        self.down = nn.Linear(WIDTH, 2, bias=False)
        self.up = nn.Linear(2, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.base(x) + self.up(self.down(x))
        return output


def adapted_model(kind: Any, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    model = nn.Sequential(AdaptedLayer(), nn.Tanh(), AdaptedLayer())
    quantize_weights(model, kind, skip_modules=("down", "up"))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("base" not in name)
    return model


def batch(step: int) -> Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(step))


class Run:
    """One training with adapters."""

    def __init__(self, kind: str, strategy: Any, seed: int) -> None:
        self.accelerator = Accelerator(cpu=True, strategy=strategy)
        model = adapted_model(kind, seed)
        trained = [
            parameter for parameter in model.parameters() if parameter.requires_grad
        ]
        self.model, self.optimizer = self.accelerator.prepare(
            model, torch.optim.AdamW(trained, lr=1e-2)
        )

    def train(self, steps: range) -> list[float]:
        losses = []
        for step in steps:
            loss = self.model(batch(step)).pow(2).mean()
            self.accelerator.backward(loss)
            self.optimizer.step()
            self.optimizer.zero_grad()
            losses.append(float(loss.detach()))
        return losses


@ranks(1, 2, timeout_s=300)
@pytest.mark.parametrize("kind", KINDS)
def test_every_quantization_resumes_under_every_strategy(
    ctx: ProcessContext, tmp_path: Path, kind: str
) -> None:
    if not available(KINDS[kind]):
        pytest.skip(f"{KINDS[kind]} is not installed")
    strategies = ("auto", "fsdp") if ctx.world.size == 1 else ("ddp", "fsdp")
    for saving in strategies:
        folder = tmp_path / saving
        first = Run(kind, saving, seed=0)
        first.train(range(2))
        first.accelerator.save_state(folder)
        expected = first.train(range(2, 4))
        for loading in strategies:
            # another base, which the checkpoint replaces
            second = Run(kind, loading, seed=1)
            second.accelerator.load_state(folder)
            torch.testing.assert_close(
                second.train(range(2, 4)), expected, rtol=1e-5, atol=1e-6
            )
