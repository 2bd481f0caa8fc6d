"""The Precision protocol: in which numbers a model computes, and what that asks of backward and step."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Final, Protocol

import torch
from torch import Tensor, nn

from hasten.config.sections.loop import AutocastKwargs, PrecisionType


@dataclass(frozen=True, slots=True)
class StepResult:
    """What became of one optimizer step."""

    applied: bool
    """False when gradients overflowed or a number was not finite, and the update was skipped."""
    scale: float | None = None
    """The loss scale in force, when the loss is scaled."""
    value: Any = None
    """What the optimizer's own `step()` returned."""


APPLIED: Final = StepResult(applied=True)
SKIPPED: Final = StepResult(applied=False)


class Precision(Protocol):
    """One precision, applied to any number of models and optimizers."""

    @property
    def spec(self) -> PrecisionType: ...

    @property
    def scaler(self) -> torch.amp.GradScaler | None:
        """The loss scaler, or None where losses are not scaled: then `scale`, `unscale` and `step` add nothing."""
        ...

    def convert(self, model: nn.Module) -> nn.Module:
        """Return the model, computing in this precision from now on; the same object. Converting twice is harmless."""
        ...

    def restore(self, model: nn.Module) -> nn.Module:
        """The model with its own forward again; weights are never changed by `convert`, so nothing else is undone."""
        ...

    def forward_context(self, kwargs: AutocastKwargs | None = None) -> AbstractContextManager[None]:
        """Return a block that computes in this precision, for code outside a prepared model."""
        ...

    def scale(self, loss: Tensor) -> Tensor:
        """Return the loss to call backward on."""
        ...

    def unscale(self, optimizer: torch.optim.Optimizer) -> None:
        """Unscale the optimizer's gradients; a second call before its step does nothing.

        Ranks: every rank, when losses are scaled.
        """
        ...

    def step(self, optimizer: torch.optim.Optimizer) -> StepResult:
        """Step the optimizer, unless its gradients overflowed on some rank.

        Ranks: every rank, when losses are scaled.
        """
        ...

    def state_dict(self) -> dict[str, Any]:
        """What must be kept to go on later, as plain values; empty when there is nothing."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a saved state."""
        ...


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
