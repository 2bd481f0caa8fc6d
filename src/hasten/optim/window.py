"""An accumulation window: its counters and optimizers, and the division of its losses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Protocol

import torch
from torch import Tensor

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


@dataclass(slots=True)
class Window:
    """One accumulation window: the micro-steps whose gradients go into one update."""

    every: int
    serial: int
    micro: int = 0
    missing: int = 0
    """Number of micro-steps whose gradients were cleared after an error."""
    closed: bool = False
    weighted: bool | None = None
    """None until the first backward of the window."""
    losses: int = 0
    """Number of losses whose gradients no optimizer has used yet."""
    losses_before: int = 0
    """The same number at the start of the current micro-step."""
    turn: int = 0
    """Number of losses of the current micro-step so far: the index of the next one."""
    weights: list[Number] = field(default_factory=list)
    """Total weight of the first, second, ... loss of the micro-steps, on this rank."""
    factors: dict[int, float | Tensor] = field(default_factory=dict)
    """Corrections of these losses, once the ranks have agreed on them."""
    models: Sequence[object] = ()
    """The models of its first micro-step; the others have the same."""


def divide_loss(loss: Tensor, num_parts: int) -> Tensor:
    """Return the loss divided by the number of parts."""
    return loss if num_parts == 1 else loss / num_parts


# Any: keywords of torch
def backpropagate(loss: Tensor, num_parts: int = 1, **kwargs: Any) -> None:
    """Backpropagate the loss divided by `parts`; `kwargs` are passed to `Tensor.backward`.

    A backward of `loss / parts` starts with the gradient 1 and turns it into 1 / parts. Starting there saves the
    division and its backward, noticeable for a small micro-step on a GPU; the gradients are bitwise equal.
    """
    if num_parts != 1:
        if (
            type(loss) is Tensor
            and loss.numel() == 1
            and kwargs.get("gradient") is None
        ):
            kwargs["gradient"] = torch.full_like(
                loss, _reciprocal(num_parts, loss.dtype)
            )
        else:
            loss = loss / num_parts
    loss.backward(**kwargs)  # type: ignore[no-untyped-call]  # torch leaves it untyped


@lru_cache(maxsize=64)  # called in every micro-step with few distinct arguments
def _reciprocal(num_parts: int, dtype: torch.dtype) -> float:
    """Return one divided by the number of parts, rounded as a tensor of this dtype rounds it."""
    return float((torch.ones((), dtype=dtype) / num_parts).item())
