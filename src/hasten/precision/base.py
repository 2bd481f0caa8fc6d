"""The Precision protocol: the compute precision of a model, and its effects on backward and step."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Final, Protocol

import torch
from torch import Tensor, nn

from hasten.config.sections.loop import AutocastKwargs, PrecisionType


@dataclass(frozen=True, slots=True)
class StepResult:
    """Result of one optimizer step."""

    applied: bool
    """False if gradients overflowed or were not finite, so that the update was skipped."""
    scale: float | None = None
    """The current loss scale, if the loss is scaled."""
    value: Any = None
    """Return value of the optimizer's `step()`."""


APPLIED: Final = StepResult(applied=True)
SKIPPED: Final = StepResult(applied=False)


class Precision(Protocol):
    """One precision, applied to any number of models and optimizers."""

    takes_half_weights: bool
    """True if a model with trainable float16 weights may be prepared where losses are scaled; only its step is an error."""

    @property
    def spec(self) -> PrecisionType: ...

    @property
    def scaler(self) -> torch.amp.GradScaler | None:
        """The loss scaler, or None if losses are not scaled; then `scale` and `unscale` do nothing, and `step` is a plain step."""
        ...

    def convert(self, model: nn.Module) -> nn.Module:
        """Make the model compute in this precision, in place; converting it again does nothing."""
        ...

    def restore(self, model: nn.Module) -> nn.Module:
        """Restore the model's original forward; `convert` never changes weights, so nothing else is undone."""
        ...

    def forward_context(
        self, kwargs: AutocastKwargs | None = None
    ) -> AbstractContextManager[None]:
        """Return a context manager that computes in this precision, for code outside a prepared model."""
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
        """Return the state to save in a checkpoint, as plain values; empty if there is none."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a saved state."""
        ...


class FullPrecision:
    """Full precision, without casts and loss scaling."""

    takes_half_weights = False
    spec: PrecisionType = "no"
    scaler: torch.amp.GradScaler | None = None

    def convert(self, model: nn.Module) -> nn.Module:
        return model

    def restore(self, model: nn.Module) -> nn.Module:
        return model

    def forward_context(
        self, kwargs: AutocastKwargs | None = None
    ) -> AbstractContextManager[None]:
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
