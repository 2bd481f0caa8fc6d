"""Gradients of trained parameters that no optimizer holds: kept and added up from update to update, as in plain torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from hasten.optim.gradients import multiply
from hasten.precision.base import Precision

if TYPE_CHECKING:
    from hasten.optim.clock import StepClock
    from hasten.optim.optimizer import PreparedOptimizer


class Unowned:
    """Keeps the gradients of earlier windows apart from those of the window in progress.

    A window's gradients are unscaled and normalised when it ends. Those of earlier windows have been, so that they must not
    be multiplied again. Where nothing will be multiplied (no accumulation, no weight, no loss scale) they stay in .grad.
    """

    def __init__(self, clock: StepClock, precision: Precision, optimizers: list[PreparedOptimizer]) -> None:
        self._clock = clock
        self._precision = precision
        self._optimizers = optimizers
        self._known: list[Tensor] = []  # of all models; under FSDP2 a model has other ones between forward and backward
        self._open = False
        self._merged = False
        self.earlier: dict[Tensor, Tensor] | None = None
        """The gradients of earlier windows, while a window is in progress whose own lie in .grad."""

    def learn(self, models: Iterable[nn.Module]) -> None:
        """Note the parameters of the models that are prepared."""
        self._known = list(dict.fromkeys(p for model in models for p in model.parameters()))

    def parameters(self) -> list[Tensor]:
        """The parameters that take gradients and belong to no optimizer."""
        if not all(optimizer.readable for optimizer in self._optimizers):
            return []  # an engine keeps its gradients elsewhere
        owned = {id(p) for optimizer in self._optimizers for p in optimizer.parameters}
        return [p for p in self._known if p.requires_grad and id(p) not in owned]

    def begin(self, changes: bool) -> None:
        """Say that a loss is about to be backpropagated, whose window may be multiplied by something at its end."""
        if self._open:
            return
        self._open, self._merged = True, False
        if changes or self._precision.scaler is not None:
            self.put_aside({p: p.grad for p in self.parameters() if p.grad is not None})

    def put_aside(self, earlier: Mapping[Tensor, Tensor]) -> None:
        """Keep these gradients apart until the window ends."""
        # A gradient may lie in memory that the next reduction overwrites.
        self.earlier = {p: grad.clone() for p, grad in earlier.items()}
        for parameter in self.parameters():
            parameter.grad = None
        self._open, self._merged = True, False

    @torch.no_grad()
    def settle(self) -> None:
        """Unscale and normalise the window's gradients and add those of earlier windows; a second call does nothing.

        Ranks: every rank.
        """
        if not self._open or self._merged or self.earlier is None:
            return
        self._merged = True
        parameters, clock = self.parameters(), self._clock
        factor: float | Tensor | None = None
        if clock.lanes is not None and clock.pending:
            clock.merge_lanes(parameters)
        elif clock.pending:
            factor = clock.correction()
        scaler = self._precision.scaler
        if scaler is not None and scaler.is_enabled():
            factor = (1.0 if factor is None else factor) / scaler.get_scale()
        if factor is not None:
            multiply([{"params": parameters}], factor)
        for parameter, grad in self.earlier.items():
            parameter.grad = grad.clone() if parameter.grad is None else parameter.grad.add_(grad)

    def close(self, applied: bool) -> None:
        """End the window. The gradients of one whose update was skipped are dropped. Ranks: every rank."""
        self.settle()
        if not applied and self.earlier is not None:
            for parameter in self.parameters():
                parameter.grad = self.earlier.get(parameter)
        self.earlier, self._open = None, False

    def saved(self) -> dict[int, Tensor]:
        """The gradients that outlive the window in progress, by the identity of their parameters."""
        if self.earlier is not None and not self._merged:
            return {id(parameter): grad for parameter, grad in self.earlier.items()}
        if self._open:
            return {}  # in .grad, together with those of the window
        return {id(p): p.grad for p in self.parameters() if p.grad is not None}

    def restore(self, gradients: Iterable[tuple[Tensor, Tensor]], open_window: bool) -> None:
        """Put back what `saved` gave, after .grad was restored."""
        self.earlier, self._open, self._merged = None, False, False
        found = dict(gradients)
        if not open_window:
            for parameter, grad in found.items():
                parameter.grad = grad
        else:
            self.earlier, self._open = found, True
