"""Full precision: the model computes in the dtype of its own weights."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from hasten.config.precision import AutocastKwargs, PrecisionType
from hasten.precision.base import StepResult


class FullPrecision:
    """Nothing is cast and nothing is scaled."""

    spec: PrecisionType = "no"
    scaler: torch.amp.GradScaler | None = None

    def convert(self, model: nn.Module) -> nn.Module:
        return model

    def restore(self, model: nn.Module) -> nn.Module:
        return model

    def forward_context(self, kwargs: AutocastKwargs | None = None) -> AbstractContextManager[None]:
        return nullcontext()

    def scale(self, loss: Tensor) -> Tensor:
        return loss

    def unscale(self, optimizer: torch.optim.Optimizer) -> None:
        return None

    def step(self, optimizer: torch.optim.Optimizer) -> StepResult:
        return StepResult(applied=True, value=optimizer.step())

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        return None
