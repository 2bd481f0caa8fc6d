"""Weights of losses: the share of each loss in its window, and the correction of the window's gradients at its end."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Real
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hasten.errors import ConfigError, StepError
from hasten.optim.window import Holder, Number, Window

if TYPE_CHECKING:
    from hasten.comm.base import Comm


@dataclass(slots=True)
class LossWeights:
    """Weights of a run's losses, and the factors that the gradients of weighted windows need.

    A loss is multiplied by its weight when it arrives; its window's total weight is known only at the window's end,
    when the gradients are divided by it.
    """

    comm: Comm | None = None
    """Ranks that gradients are averaged over; None for this process alone."""
    unit: float | None = None
    """Rounded first weight of the run: weights are divided by it to keep scaled losses in fp16's range."""
    share: Tensor | None = None
    """Weight of a loss without a weight among the ranks of one sequence; None for equal weights."""
    idle: bool = False
    """True if losses count for nothing: this rank only takes part in the collectives of a step."""
    joined: bool = False
    """True if backward passes gradients between ranks: those of other ranks flow through this rank's graph."""

    def effective(self, weight: Number | None) -> Number | None:
        """Return the effective weight of a loss given this weight; None for equal weights."""
        if self.idle:
            return 0.0
        return self.share if weight is None else weight

    def weigh(
        self,
        window: Window,
        loss: Tensor,
        weight: Number,
        boundary: bool,
        holders: Sequence[Holder],
    ) -> Tensor:
        """Add a weight to the window and return the loss multiplied by it; `holders` have the window's gradients.

        Raises: StepError when the window's gradients were used already, or for a second weighted loss in each of several micro-steps.
        """
        weight = checked_weight(weight)
        if self.unit is None:
            self.unit = agree_on_unit(weight, self.comm)
        loss_index = window.turn if window.micro > 0 or window.every == 1 else 0
        if loss_index in window.factors or any(
            not holder.spent and holder.settled_in(window.serial) for holder in holders
        ):
            raise StepError(
                "backward() came after this window's gradients were clipped, unscaled or stepped; its share would be "
                "wrong. Call backward() for every loss of the window first."
            )
        window.turn += 1
        window.weights += [0] * (loss_index + 1 - len(window.weights))
        window.weights[loss_index] = window.weights[loss_index] + weight
        share = multiply_loss(loss, weight / (self.unit * window.every))
        if len(window.weights) == 1:
            return share
        if not boundary or window.losses_before > 0:
            raise StepError(
                f"backward(weight=...) was called {loss_index + 1} times in one micro-step of a window of {window.every}: each loss is divided by its "
                "own total weight, which is known only at the window's end, when the gradients are added up already. Add the losses before "
                "backward(), or set gradient_accumulation_steps=1."
            )
        # The one correction of the window is the first loss's; the others' totals are known here.
        self._agree(window, [0, loss_index])
        return multiply_loss(share, window.factors[loss_index] / window.factors[0])

    def correction(self, window: Window) -> float | Tensor:
        """Return the factor for the gradients of a weighted window. Ranks: every rank of the loss axes, at the first call."""
        self._agree(window, [0])
        return window.factors[0]

    def _agree(self, window: Window, loss_indices: Sequence[int]) -> None:
        """Compute the missing correction factors of these losses from their weights on all ranks."""
        loss_indices = [
            loss_index
            for loss_index in loss_indices
            if loss_index not in window.factors
        ]
        if not loss_indices:
            return
        assert self.unit is not None, "a weighted window has a unit"
        total_weights = [window.weights[loss_index] for loss_index in loss_indices]
        num_ranks = 1
        if self.comm is not None and self.comm.size > 1:
            num_ranks = self.comm.size
            total_weights = list(
                self.comm.all_reduce(
                    torch.stack(
                        [
                            _as_scalar(weight, self.comm.device)
                            for weight in total_weights
                        ]
                    )
                )
            )
        scale = num_ranks * self.unit * window.every
        for loss_index, total_weight in zip(loss_indices, total_weights, strict=True):
            # a loss of weight zero has zero gradients: leave them
            if isinstance(total_weight, Tensor):
                window.factors[loss_index] = torch.where(
                    total_weight == 0,
                    torch.ones_like(total_weight),
                    scale / total_weight,
                )
            else:
                window.factors[loss_index] = (
                    scale / total_weight if total_weight else 1.0
                )


def agree_on_unit(weight: Number, comm: Comm | None) -> float:
    """Return the power of two nearest to the largest first weight of any rank. Ranks: every rank of the loss axes."""
    largest_weight = float(weight)
    if comm is not None and comm.size > 1:
        largest_weight = float(
            comm.all_reduce(torch.tensor(largest_weight, device=comm.device), "max")
        )
    return 2.0 ** round(math.log2(largest_weight)) if largest_weight > 0 else 1.0


def checked_weight(weight: Number) -> Number:
    """Return the weight as a number or an exact scalar tensor. Raises: ConfigError for an invalid count."""
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


def multiply_loss(loss: Tensor, factor: Number) -> Tensor:
    """Return the loss multiplied by a factor, in the dtype of the loss, or in float32 if that is wider."""
    if isinstance(factor, Tensor):
        factor = factor.to(torch.promote_types(loss.dtype, torch.float32))
    return loss * factor


def _is_count(weight: object) -> bool:
    return isinstance(weight, Real) and float(weight) >= 0 and math.isfinite(weight)


def _as_scalar(value: Number, device: torch.device) -> Tensor:
    """Return `value` as a one-element tensor on `device`, in a dtype that counts exactly."""
    dtype = torch.float32 if device.type == "mps" else torch.float64
    return torch.as_tensor(value, dtype=dtype, device=device)
