"""AcceleratedOptimizer: hasten's prepared optimizer under its established name."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch

from accelerate._impl import ambient
from accelerate._impl.copying import Copyable
from accelerate._impl.surface.shown import shown_property
from accelerate._impl.views.state import AcceleratorState, GradientState
from hasten.optim.clock import StepClock
from hasten.optim.optimizer import PreparedOptimizer
from hasten.precision.base import FullPrecision, Precision, StepResult


class _WithScaler(FullPrecision):
    """The precision of a script that scales its losses itself, with a scaler of torch's."""

    def __init__(self, scaler: Any) -> None:
        self.scaler: Any = scaler

    def step(self, optimizer: torch.optim.Optimizer) -> StepResult:
        updates: list[Any] = []
        with optimizer.register_step_post_hook(
            lambda *hook_arguments: updates.append(hook_arguments)
        ):
            self.scaler.step(optimizer)
        self.scaler.update()
        return StepResult(applied=bool(updates))


# Any below: torch's scaler, and results of optimizers
class AcceleratedOptimizer(Copyable, PreparedOptimizer):
    """The user's optimizer, stepping and clearing only where a window ends."""

    belongs_to_run = ("_clock", "_precision", "scaler")

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        device_placement: bool = True,
        scaler: Any = None,  # torch's GradScaler
        *,
        clock: StepClock | None = None,
        precision: Precision | None = None,
    ) -> None:
        AcceleratorState()  # raises a ValueError where there is no Accelerator
        if scaler is None:
            plain = FullPrecision()
        else:
            plain = _WithScaler(scaler)
        super().__init__(optimizer, clock or ambient.run_clock(), precision or plain)
        self.scaler = scaler
        self.device_placement = device_placement

    def rejoin(self) -> None:
        """Follow the windows of the latest Accelerator, unless this is a copy that follows its original's."""
        for attribute_name, plain in (
            ("_clock", ambient.run_clock()),
            ("_precision", FullPrecision()),
            ("scaler", None),
        ):
            vars(self).setdefault(attribute_name, plain)
        self._scaled = self._precision.scaler is not None
        self._clock.register_optimizer(self)

    def _refuse_unscaled_gradients(self) -> None:
        # a user who gives a scaler scales the loss
        if not isinstance(self._precision, _WithScaler):
            super()._refuse_unscaled_gradients()

    step_was_skipped = _is_overflow = shown_property(
        "skipped",
        "Whether the latest update was skipped, also under the name tests write to.",
        lambda self, skipped: setattr(self, "skipped", skipped),
    )
    gradient_state = shown_property(
        lambda self: GradientState(), "The view on the current window."
    )
    accelerator_state = shown_property(
        lambda self: AcceleratorState(), "The view on the process."
    )
    __repr__ = torch.optim.Optimizer.__repr__

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Clear the gradients, unless a window that is still open needs them."""
        if self.acts_now:  # quirk: ZERO_GRAD_WAITS
            if (
                set_to_none is not None
                and "set_to_none"
                not in inspect.signature(self.optimizer.zero_grad).parameters
            ):
                raise ValueError(
                    "`set_to_none` for Optimizer.zero_grad` is not supported by this optimizer."
                )
            super().zero_grad(True if set_to_none is None else set_to_none)


def patch_optimizer_step(
    accelerated_optimizer: AcceleratedOptimizer, method: Callable[..., Any]
) -> Callable[..., Any]:
    """Return the method; hasten learns from the step's result whether it was skipped, so nothing is patched."""
    return method
