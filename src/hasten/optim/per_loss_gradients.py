"""Gradients of several weighted losses of one window, kept apart until the total weight of each is known."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from hasten.errors import StepError


class Lanes:
    """One set of gradients for each loss of a micro-step; the one in use lies in the parameters' own .grad."""

    __slots__ = ("_current", "_kept")

    def __init__(self) -> None:
        self._current = 0
        self._kept: dict[int, dict[Tensor, Tensor]] = {}

    def switch(self, lane: int, parameters: Iterable[Tensor]) -> None:
        """Let the next backward add to the gradients of this lane.

        Raises: StepError when the gradients so far are not in the parameters.
        """
        if lane == self._current:
            return
        here, there = self._kept.setdefault(self._current, {}), self._kept.setdefault(lane, {})
        parameters = list(dict.fromkeys(parameters))
        if not any(self._kept.values()) and not any(p.grad is not None for p in parameters):
            raise StepError(
                "two weighted backward()s came in one micro-step, but the gradients of the first are not in the "
                "parameters yet, so they cannot be kept apart (replicated shards add them up elsewhere). Pass "
                "GradientAccumulationPlugin(sync_each_batch=True), or add the losses before backward()."
            )
        for parameter in parameters:
            grad = parameter.grad
            if grad is not None:
                # A view lies in memory that the next reduction may overwrite.
                here[parameter] = grad.clone() if grad._is_view() else grad
            parameter.grad = there.pop(parameter, None)
        self._current = lane

    @torch.no_grad()
    def merge(self, parameters: Iterable[Tensor], factors: Mapping[int, float | Tensor]) -> None:
        """Put the sum of all lanes, each multiplied by its factor, into the parameters' .grad.

        Raises: StepError for a lane without a factor.
        """
        for parameter in parameters:
            held = [(self._current, parameter.grad)]
            held += [(lane, kept.pop(parameter, None)) for lane, kept in self._kept.items() if lane != self._current]
            total: Tensor | None = None
            for lane, grad in held:
                if grad is None:
                    continue
                if lane not in factors:
                    raise StepError(
                        f"the window ends without loss number {lane + 1} of its micro-steps, whose gradients are "
                        "neither weighed nor synchronised. Call backward() equally often in every micro-step of a "
                        "window, with weight=0 for a loss that does not count."
                    )
                factor = factors[lane]
                part = grad.mul_(factor.to(grad.device) if isinstance(factor, Tensor) else factor)
                total = part if total is None else total.add_(part)
            parameter.grad = total

    def drop(self, parameters: Iterable[Tensor]) -> None:
        """Forget the gradients of these parameters, which are being cleared."""
        for parameter in parameters:
            for kept in self._kept.values():
                kept.pop(parameter, None)

    def refuse_leftovers(self, parameters: Iterable[Tensor]) -> None:
        """Raise when a parameter still has gradients in a lane that is not in use."""
        wanted = set(parameters)
        if any(parameter in wanted for kept in self._kept.values() for parameter in kept):
            raise StepError(
                "a window with several weighted losses per micro-step ended without the step of an optimizer that has "
                "gradients from it; they cannot be carried into the next window. Call step() or zero_grad() of every "
                "optimizer where the window ends."
            )
