"""Asynchronous copies of losses to the host: collected over several updates, copied together, and read after arrival.

A copy for every update would slow a tiny training step on a GPU by some percent. On the CPU a loss is read immediately.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, Generic, TypeVar

import torch
from torch import Tensor

from hasten.runtime.devices import kind_of
from hasten.runtime.streams import HostCopy

Origin = TypeVar("Origin")

_LOSSES_PER_COPY: Final = 256
"""Number of losses per copy."""
_COPY_INTERVAL_S: Final = 0.25
"""Seconds after which collected losses are copied: a loop of slow steps is checked in every step."""


@dataclass(slots=True)
class Update(Generic[Origin]):
    """The losses of one update."""

    step: int = 0
    losses: list[tuple[Tensor, float | Tensor | None, Origin]] = field(
        default_factory=list
    )
    """Each loss with its weight and origin."""
    values: list[float] = field(default_factory=list)
    """The losses as numbers, after arrival; a loss of weight zero is 0."""


@dataclass(slots=True)
class LateLosses(Generic[Origin]):
    """The losses of one rank. Called by the training thread once per backward, so that its overhead matters."""

    overwritten: bool = False
    """True if the next step overwrites a loss, as with a compiler's CUDA graphs: it is copied at once."""
    odd_only: bool = False
    """True if losses matter only when one in the same copy is not finite."""
    collected: list[tuple[Tensor, float | Tensor | None, Origin, int]] = field(
        default_factory=list
    )
    """Losses with their weights, origins and update numbers."""
    _copying: (
        tuple[list[tuple[Tensor, float | Tensor | None, Origin, int]], HostCopy] | None
    ) = None
    _copied_at: float = field(default_factory=time.monotonic)

    def add(
        self, loss: Tensor, weight: float | Tensor | None, origin: Origin, step: int
    ) -> bool:
        """Add a loss of update number `step`; return whether it is time to copy the collected losses."""
        # A view would keep its whole base tensor alive.
        needs_copy = self.overwritten or loss._is_view()
        if needs_copy:
            stored_loss = loss.detach().clone()
        else:
            stored_loss = loss.detach()
        self.collected.append(
            (
                stored_loss,
                weight,
                origin,
                step,
            )
        )
        return (
            len(self.collected) >= _LOSSES_PER_COPY
            or time.monotonic() - self._copied_at >= _COPY_INTERVAL_S
        )

    def take_collected(self) -> Update[Origin]:
        """Return the collected losses as those of one update, and clear them."""
        loss_records = self.collected
        self.collected = []
        return Update(
            losses=[(loss, weight, origin) for loss, weight, origin, _ in loss_records]
        )

    def read_all(self) -> list[Update[Origin]]:
        """Return all losses that have not been read yet, waiting for them."""
        return [*self.copy(ready_only=False), *self._read_arrived()]

    def copy(self, ready_only: bool = True) -> list[Update[Origin]]:
        """Start the copy of the collected losses, and return the losses of the previous copy.

        With `ready_only`, a loss that its device has not computed yet stays collected if waiting for it would cost a step.
        """
        arrived_updates = self._read_arrived()
        self._copied_at = time.monotonic()
        loss_records = self.collected
        self.collected = []
        if loss_records and kind_of(loss_records[-1][0].device).lazy:
            # the latest loss is not computed yet, and reading it would split its step in two
            if ready_only:
                loss_records, self.collected = loss_records[:-1], loss_records[-1:]
            loss_records = [
                (loss.cpu(), _move_to_host(weight), origin, step)
                for loss, weight, origin, step in loss_records
            ]
        if loss_records:
            weighted_losses = [(loss, weight) for loss, weight, _, _ in loss_records]
            self._copying = loss_records, HostCopy(_join_losses(weighted_losses))
        return arrived_updates

    def _read_arrived(self) -> list[Update[Origin]]:
        if self._copying is None:
            return []
        (loss_records, host_copy), self._copying = self._copying, None
        numbers: list[float] = host_copy.wait().tolist()
        if self.odd_only and math.isfinite(sum(numbers)):
            return []
        updates = _group_by_update(loss_records)
        remaining_numbers = iter(numbers)
        for update in updates:
            update.values = [next(remaining_numbers) for _ in update.losses]
        return updates


def _move_to_host(weight: float | Tensor | None) -> float | Tensor | None:
    return weight.cpu() if isinstance(weight, Tensor) else weight


def _group_by_update(
    loss_records: Sequence[tuple[Tensor, float | Tensor | None, Origin, int]],
) -> list[Update[Origin]]:
    """Group losses by update, in the same order."""
    updates: list[Update[Origin]] = []
    for loss, weight, origin, step in loss_records:
        if not updates or updates[-1].step != step:
            updates.append(Update(step))
        updates[-1].losses.append((loss, weight, origin))
    return updates


def read_losses(update: Update[Origin]) -> list[float]:
    """Return the losses as numbers, synchronously."""
    if (
        len(update.losses) == 1
        and update.losses[0][1] is None
        and update.losses[0][0].ndim == 0
    ):
        return [update.losses[0][0].item()]
    values: list[float] = _join_losses(
        [(loss, weight) for loss, weight, _ in update.losses]
    ).tolist()
    return values


@torch.no_grad()
def _join_losses(losses: Sequence[tuple[Tensor, float | Tensor | None]]) -> Tensor:
    """Return the losses in one tensor, using a constant number of kernels.

    A loss of weight zero may be a mean over nothing, and counts as 0.
    """
    values = torch.stack([_sum_elements(loss) for loss, _ in losses])
    weights = [weight for _, weight in losses]
    if all(isinstance(weight, Tensor) for weight in weights):
        weight_sums = []
        for weight in weights:
            if isinstance(weight, Tensor):
                weight_sums.append(_sum_elements(weight).to(values.device))
        has_weight = torch.stack(weight_sums) != 0
        return torch.where(has_weight, values, 0)
    for index, weight in enumerate(weights):
        if isinstance(weight, Tensor):
            values[index] = torch.where(
                _sum_elements(weight).to(values.device) != 0, values[index], 0
            )
        elif weight == 0:
            values[index] = 0
    return values


def _sum_elements(tensor: Tensor) -> Tensor:
    """Return the sum of a tensor's elements, without a kernel if there is only one."""
    if tensor.ndim == 0:
        return tensor
    return tensor.reshape(()) if tensor.numel() == 1 else tensor.sum()
