"""An accumulation window: its counters and optimizers, the division of its losses, and gradients that it holds separately."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache
from typing import Any, Protocol

import torch
from torch import Tensor

from hasten.errors import StepError


class SeparateGradients:
    """Separate gradients for each loss of a micro-step; those of the current loss are in the parameters' .grad."""

    __slots__ = ("_current", "_kept")

    def __init__(self) -> None:
        self._current = 0
        self._kept: dict[int, dict[Tensor, Tensor]] = {}

    def switch(self, loss_index: int, parameters: Iterable[Tensor]) -> None:
        """Make the next backward add to the gradients of this loss.

        Raises: StepError when the gradients so far are not in the parameters.
        """
        if loss_index == self._current:
            return
        here, there = self._kept.setdefault(self._current, {}), self._kept.setdefault(loss_index, {})
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
                # A view is in memory that the next reduction may overwrite.
                here[parameter] = grad.clone() if grad._is_view() else grad
            parameter.grad = there.pop(parameter, None)
        self._current = loss_index

    @torch.no_grad()
    def merge(self, parameters: Iterable[Tensor], factors: Mapping[int, float | Tensor]) -> None:
        """Set the parameters' .grad to the sum over all losses, each multiplied by its factor.

        Raises: StepError for a loss without a factor.
        """
        for parameter in parameters:
            held = [(self._current, parameter.grad)]
            held += [
                (loss_index, kept.pop(parameter, None))
                for loss_index, kept in self._kept.items()
                if loss_index != self._current
            ]
            total: Tensor | None = None
            for loss_index, grad in held:
                if grad is None:
                    continue
                if loss_index not in factors:
                    raise StepError(
                        f"the window ends without loss number {loss_index + 1} of its micro-steps, whose gradients are "
                        "neither weighed nor synchronised. Call backward() equally often in every micro-step of a "
                        "window, with weight=0 for a loss that does not count."
                    )
                factor = factors[loss_index]
                part = grad.mul_(factor.to(grad.device) if isinstance(factor, Tensor) else factor)
                total = part if total is None else total.add_(part)
            parameter.grad = total

    def drop(self, parameters: Iterable[Tensor]) -> None:
        """Drop the gradients of these parameters, which are being cleared."""
        for parameter in parameters:
            for kept in self._kept.values():
                kept.pop(parameter, None)

    def refuse_leftovers(self, parameters: Iterable[Tensor]) -> None:
        """Raise StepError when a parameter still has gradients of a loss that is not current."""
        wanted = set(parameters)
        if any(parameter in wanted for kept in self._kept.values() for parameter in kept):
            raise StepError(
                "a window with several weighted losses per micro-step ended without the step of an optimizer that has "
                "gradients from it; they cannot be carried into the next window. Call step() or zero_grad() of every "
                "optimizer where the window ends."
            )


Key = tuple[int, ...]
Number = int | float | Tensor


class Holder(Protocol):
    """Protocol of an optimizer for the clock: the holder of a window's gradients."""

    spent: bool
    """True if the gradients were used and not cleared since."""
    called_at: int
    """The clock's number of updates when `step` or `zero_grad` was last called."""

    @property
    def parameters(self) -> list[Tensor]: ...

    @property
    def scaled(self) -> bool:
        """True if losses are scaled, so that gradients may overflow."""
        ...

    @property
    def readable(self) -> bool:
        """True if gradients are in the parameters' .grad."""
        ...

    def settled_in(self, serial: int) -> bool:
        """Return True if the gradients are unscaled and normalised for this window."""
        ...

    def note_gradients(self) -> None:
        """Record the gradients, to detect later whether a backward has changed them."""
        ...

    def clear_late(self) -> None:
        """Clear the gradients if `zero_grad` was deferred to the window's end."""
        ...


@dataclass(slots=True)
class Window:
    """One accumulation window: the micro-steps whose gradients go into one update."""

    every: int
    serial: int
    micro: int = 0
    missing: int = 0
    """Number of micro-steps whose gradients were lost with an interrupted run."""
    closed: bool = False
    weighted: bool | None = None
    """None until the first backward of the window."""
    losses: int = 0
    """Number of losses whose gradients no optimizer has used yet."""
    before: int = 0
    """The same number at the start of the current micro-step."""
    turn: int = 0
    """Number of losses of the current micro-step so far: the index of the next one."""
    weights: list[Number] = field(default_factory=list)
    """Total weight of the first, second, ... loss of the micro-steps, on this rank."""
    factors: dict[int, float | Tensor] = field(default_factory=dict)
    """Corrections of these losses, once the ranks have agreed on them."""
    separate_gradients: SeparateGradients | None = None
    """Gradients of the second and further weighted losses, separate until the window's end."""

    def copy(self) -> Window:
        """Return a copy of the window, for `become`."""
        return replace(self, weights=list(self.weights), factors=dict(self.factors))

    def as_plain(self, key: Key | None, current: bool) -> dict[str, Any]:
        """Return the window's progress as plain JSON values."""
        return {
            "key": None if key is None else list(key),
            "current": current,
            "micro": self.micro,
            "every": self.every,
            "missing": self.missing,
            "weighted": self.weighted,
            "losses": self.losses,
            "weight": float(self.weights[0]) if self.weights else 0.0,
        }

    def become(self, kept: Window) -> None:
        """Restore the state saved in `kept`."""
        fresh = kept.copy()  # `kept` may be needed again
        for one in fields(fresh):
            setattr(self, one.name, getattr(fresh, one.name))


def hold(windows: Mapping[Key | None, Window]) -> Callable[[], dict[Key | None, Window]]:
    """Return a function that restores these windows to their current state and returns them by name; it is reusable."""
    kept = [(key, window, window.copy()) for key, window in windows.items()]

    def put_back() -> dict[Key | None, Window]:
        for _, window, copy in kept:
            window.become(copy)
        return {key: window for key, window, _ in kept}

    return put_back


def divided(loss: Tensor, parts: int) -> Tensor:
    """Return the loss divided by the number of parts."""
    return loss if parts == 1 else loss / parts


def backpropagate(loss: Tensor, parts: int = 1, **kwargs: Any) -> None:  # Any: keywords of torch
    """Backpropagate the loss divided by `parts`; `kwargs` are passed to `Tensor.backward`.

    A backward of `loss / parts` starts with the gradient 1 and turns it into 1 / parts. Starting there saves the
    division and its backward, noticeable for a small micro-step on a GPU; the gradients are bitwise equal.
    """
    if parts != 1:
        if type(loss) is Tensor and loss.numel() == 1 and kwargs.get("gradient") is None:
            kwargs["gradient"] = torch.full_like(loss, _share(parts, loss.dtype))
        else:
            loss = loss / parts
    loss.backward(**kwargs)  # type: ignore[no-untyped-call]  # torch leaves it untyped


@lru_cache(maxsize=64)  # called in every micro-step with few distinct arguments
def _share(parts: int, dtype: torch.dtype) -> float:
    """Return one divided by the number of parts, rounded as a tensor of this dtype rounds it."""
    return float((torch.ones((), dtype=dtype) / parts).item())
