"""AcceleratedOptimizer: hasten's prepared optimizer under its established name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from accelerate._impl import ambient
from accelerate._impl.copying import Copyable
from accelerate._impl.surface.shown import shown
from accelerate._impl.views.gradient_state import GradientState
from accelerate._impl.views.state import AcceleratorState
from hasten.optim.clock import StepClock
from hasten.optim.optimizer import PreparedOptimizer, SharedWindow
from hasten.precision.base import APPLIED, SKIPPED, FullPrecision, Precision


class AcceleratedOptimizer(Copyable, PreparedOptimizer):
    """The user's optimizer, stepping and clearing only where a window ends."""

    belongs_to_run = ("_clock", "_precision", "_share", "scaler")

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        device_placement: bool = True,
        scaler: Any = None,  # Any: torch's GradScaler; the Accelerator's precision brings its own
        *,
        clock: StepClock | None = None,
        precision: Precision | None = None,
    ) -> None:
        super().__init__(optimizer, clock or ambient.clock(), precision or FullPrecision())
        self.scaler = scaler
        self.device_placement = device_placement

    def rejoin(self) -> None:
        """Follow the windows of the latest Accelerator, unless this is a copy that follows its original's."""
        kept = vars(self)
        kept.setdefault("_clock", ambient.clock())
        kept.setdefault("_precision", FullPrecision())
        kept.setdefault("scaler", None)
        self._scaled = self._precision.scaler is not None
        self._share = SharedWindow()
        self._clock.join(self)

    _is_overflow = shown(
        "step_was_skipped",
        "Whether the latest step was skipped, under the name tests write to.",
        lambda self, skipped: setattr(self, "last", SKIPPED if skipped else APPLIED),
    )
    gradient_state = shown(lambda self: GradientState(), "The view on the current window.")
    accelerator_state = shown(lambda self: AcceleratorState(), "The view on the process.")
    __repr__ = torch.optim.Optimizer.__repr__

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Clear the gradients, unless a window that is still open needs them."""
        if self.acts_now:  # quirk: ZERO_GRAD_WAITS
            super().zero_grad(True if set_to_none is None else set_to_none)


def patch_optimizer_step(accelerated_optimizer: AcceleratedOptimizer, method: Callable[..., Any]) -> Callable[..., Any]:
    """The method; hasten learns from the step's result whether it was skipped, so nothing is patched."""
    return method
