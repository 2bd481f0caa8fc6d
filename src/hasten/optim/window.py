"""One accumulation window: its losses, their weights, and what their gradients must be multiplied by."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from numbers import Real
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from hasten.config.optim import MAX_MICRO_STEPS
from hasten.errors import ConfigError
from hasten.optim.per_loss_gradients import Lanes

if TYPE_CHECKING:
    from hasten.comm.base import Comm

Key = tuple[int, ...]
Number = int | float | Tensor


class Holder(Protocol):
    """An optimizer, as the clock sees it: who holds the gradients of a window."""

    spent: bool
    """Its gradients were used and not cleared since."""
    called_at: int
    """The clock's number of updates when its `step` or `zero_grad` was last called."""

    @property
    def parameters(self) -> list[Tensor]: ...

    @property
    def scaled(self) -> bool:
        """Whether its losses are scaled, so that gradients overflow now and then."""
        ...

    @property
    def readable(self) -> bool:
        """Whether its gradients lie in the parameters' .grad."""
        ...

    def settled_in(self, serial: int) -> bool:
        """Whether its gradients are unscaled and normalised for this window."""
        ...

    def note_gradients(self) -> None:
        """Remember the gradients as they are, to tell later whether a backward has changed them."""
        ...

    def clear_late(self) -> None:
        """Clear the gradients if `zero_grad` was put off until the window's end."""
        ...


@dataclass(slots=True)
class Window:
    """One accumulation window: the micro-steps whose gradients go into one update."""

    every: int
    serial: int
    micro: int = 0
    missing: int = 0
    """Micro-steps whose gradients were lost with an interrupted run."""
    closed: bool = False
    weighted: bool | None = None
    """None until the first backward of the window."""
    losses: int = 0
    """Losses whose gradients no optimizer has used yet."""
    before: int = 0
    """The same number when the current micro-step began."""
    turn: int = 0
    """Losses of the current micro-step so far: the place of the next one among them."""
    weights: list[Number] = field(default_factory=list)
    """The total weight of the first, second, ... loss of the micro-steps, on this rank."""
    factors: dict[int, float | Tensor] = field(default_factory=dict)
    """Their corrections, once the ranks have agreed on them."""
    lanes: Lanes | None = None
    """The gradients of the second and further weighted losses, kept apart until the window's end."""

    def copy(self) -> Window:
        """The window as it is now, for `become`."""
        return replace(self, weights=list(self.weights), factors=dict(self.factors))

    def as_plain(self, key: Key | None, current: bool) -> dict[str, Any]:
        """The window's position as plain JSON values."""
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
        """Be as `kept` was."""
        fresh = kept.copy()  # which may be needed again
        for one in fields(fresh):
            setattr(self, one.name, getattr(fresh, one.name))


def hold(windows: Mapping[Key | None, Window]) -> Callable[[], dict[Key | None, Window]]:
    """Returns what puts these windows back to where they are now and gives them, by name; it may be called again."""
    kept = [(key, window, window.copy()) for key, window in windows.items()]

    def put_back() -> dict[Key | None, Window]:
        for _, window, copy in kept:
            window.become(copy)
        return {key: window for key, window, _ in kept}

    return put_back


def checked_weight(weight: Number) -> Number:
    """The weight as a number or an exact tensor without dimensions. Raises: ConfigError for what is no count."""
    if isinstance(weight, Tensor):
        if weight.numel() != 1:
            raise ConfigError(
                f"backward(weight=...) got a tensor of shape {tuple(weight.shape)}; a loss has one weight. "
                f"Pass a number or a one-element tensor, e.g. weight=mask.sum()."
            )
        weight = _as_scalar(weight.detach().reshape(()), weight.device)
    elif not _is_count(weight):
        raise ConfigError(
            f"backward(weight={weight!r}) is not a count; it would turn the mean into something else. "
            f"Pass the number of tokens or samples the loss was averaged over."
        )
    return weight


def times(loss: Tensor, factor: Number) -> Tensor:
    """Return the loss multiplied by a factor, in the type of the loss, or in float32 if that is wider."""
    if isinstance(factor, Tensor):
        factor = factor.to(torch.promote_types(loss.dtype, torch.float32))
    return loss * factor


def _is_count(weight: object) -> bool:
    return isinstance(weight, Real) and float(weight) >= 0 and math.isfinite(weight)


def agree_on_factors(window: Window, unit: float | None, comm: Comm | None, places: list[int]) -> None:
    """Compute what the gradients of these losses must be multiplied by, from their weights on all ranks."""
    if not places:
        return
    assert unit is not None, "a weighted window has a unit"
    totals, ranks = [window.weights[place] for place in places], 1
    if comm is not None and comm.size > 1:
        ranks = comm.size
        totals = list(comm.all_reduce(torch.stack([_as_scalar(w, comm.device) for w in totals])))
    scale = ranks * unit * window.every
    for place, total in zip(places, totals, strict=True):
        if isinstance(total, Tensor):  # a loss that weighs nothing has zero gradients: leave them
            window.factors[place] = torch.where(total == 0, torch.ones_like(total), scale / total)
        else:
            window.factors[place] = scale / total if total else 1.0


def agree_on_unit(weight: Number, comm: Comm | None) -> float:
    """The power of two nearest to the largest first weight of any rank. Ranks: every rank of the loss axes."""
    first = float(weight)
    if comm is not None and comm.size > 1:
        first = float(comm.all_reduce(torch.tensor(first, device=comm.device), "max"))
    return 2.0 ** round(math.log2(first)) if first > 0 else 1.0


def _as_scalar(value: Number, device: torch.device) -> Tensor:
    """`value` as a one-element tensor on `device`, in a type that counts exactly."""
    dtype = torch.float32 if device.type == "mps" else torch.float64
    return torch.as_tensor(value, dtype=dtype, device=device)


def check_every(every: object) -> None:
    """Raise unless `every` can be a window's length."""
    if not isinstance(every, int) or isinstance(every, bool) or not 1 <= every <= MAX_MICRO_STEPS:
        raise ConfigError(
            f"gradient_accumulation_steps={every!r} is not a whole number of at least 1 and at most {MAX_MICRO_STEPS}; a window of that "
            f"length never ends. Set it to 1 to update after every backward()."
        )
