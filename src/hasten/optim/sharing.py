"""Clearing an optimizer's gradients in a window it shares with other optimizers' losses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hasten.errors import StepError
from hasten.optim.gradients import versions

if TYPE_CHECKING:
    from hasten.optim.clock import StepClock


class Share:
    """What one optimizer must know to clear what a plain loop would clear, and nothing else.

    In a plain loop, gradients that arrive between `step` and `zero_grad` are thrown away: a generator's loss also
    reaches the critic. In a window, `step` before the last micro-step marks the gradients that count, and `zero_grad`
    takes the parameters back to that mark.
    """

    __slots__ = ("_copies", "_first", "_intruded", "_marked", "_noted", "clears_late")

    def __init__(self) -> None:
        self.clears_late: bool | None = None
        """The `set_to_none` of a zero_grad() that waits for the window's end."""
        self._noted: list[tuple[Tensor | None, int]] = []
        self._marked = False
        self._intruded: bool | None = None  # whether other losses reach these parameters between step and zero_grad
        self._copies: list[Tensor | None] | None = None
        self._first: list[Tensor | None] | None = None  # what lay there before the run's first zero_grad

    def reset(self) -> None:
        """Forget the marks: the gradients were cleared."""
        self.clears_late = self._copies = self._first = None
        self._noted, self._marked = [], False

    def note(self, parameters: Sequence[Tensor]) -> None:
        """Remember the gradients at the start of a window's last micro-step."""
        if not self._marked:
            self._noted = versions(parameters)

    @torch.no_grad()
    def mark(self, parameters: Sequence[Tensor]) -> None:
        """Remember the gradients as those that count: `step` was called before the window's end."""
        if self._first is not None:  # the loop clears before its backward: what lay there then does not count
            for parameter, first in zip(parameters, self._first, strict=True):
                if first is not None and parameter.grad is not None:
                    parameter.grad -= first
        self._first, self._marked = None, True
        self._noted = versions(parameters)
        # The first mark finds out whether copies are needed at all.
        self._copies = None if self._intruded is False else [_copy(p.grad) for p in parameters]

    def clear(self, parameters: Sequence[Tensor], set_to_none: bool, clock: StepClock) -> None:
        """Do what zero_grad() may do while the window still needs this optimizer's gradients."""
        changed = self._changed(parameters)
        if not self._marked:
            if clock.boundary:
                self.clears_late = set_to_none if changed else None
            elif self._intruded is None and self._first is None and not clock.shared:
                self._first = [_copy(p.grad) for p in parameters]
            return
        if self._intruded is None:
            self._intruded = changed
        if changed and self._copies is not None:
            self._rewind(parameters, clock)
        elif changed:
            self._intruded = True
            self.clears_late = set_to_none if clock.boundary else None
        self._marked, self._copies = False, None

    def _changed(self, parameters: Sequence[Tensor]) -> bool:
        """Whether a backward has reached one of the parameters since the gradients were noted."""
        now = versions(parameters)
        return len(now) != len(self._noted) or any(
            a is not b or m != n for (a, m), (b, n) in zip(now, self._noted, strict=True)
        )

    def _rewind(self, parameters: Sequence[Tensor], clock: StepClock) -> None:
        if clock.lanes is not None:
            raise StepError(
                "zero_grad() would have to clear the gradients of another optimizer's weighted loss and keep those of "
                "the window's earlier micro-steps, which are spread over several weighted losses. Give this "
                "optimizer's model a window of its own (accumulate(model)), or add the losses before backward()."
            )
        assert self._copies is not None, "there is something to go back to"
        for parameter, copy in zip(parameters, self._copies, strict=True):
            parameter.grad = copy

    def refuse_step(self, name: str) -> None:
        """Raise: zero_grad() came between a backward() that counts and step()."""
        raise StepError(
            f"{name}.zero_grad() came between backward() and step() in the last micro-step of a window that several "
            "optimizers share. The gradients of that backward() cannot be cleared without those of the window's "
            "earlier micro-steps. Call step() and zero_grad() in every micro-step, or give this optimizer's model a "
            "window of its own (accumulate(model))."
        )


def _copy(grad: Tensor | None) -> Tensor | None:
    return None if grad is None else grad.detach().clone()
