"""Losses on their way to the host: gathered over several updates, copied together, and read once they have arrived.

A copy for every update would cost a tiny training step on a GPU some percent; one for many updates costs nothing that can be measured.
On the CPU a loss is read at once.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, Generic, TypeVar

import torch
from torch import Tensor

Origin = TypeVar("Origin")

_UPDATES: Final = 64
"""Updates gathered for one copy at most."""
_SECONDS: Final = 0.25
"""Seconds after which what was gathered is copied: a loop of slow steps is looked at after every update."""
_MOST: Final = 4096


@dataclass(slots=True)
class Update(Generic[Origin]):
    """The losses of one update."""

    step: int = 0
    losses: list[tuple[Tensor, float | Tensor | None, Origin]] = field(default_factory=list)
    """Each with its weight and what it came from."""
    values: list[float] = field(default_factory=list)
    """The losses as numbers, once they have arrived; one that weighs nothing is 0."""


class LateLosses(Generic[Origin]):
    """The losses of one rank. Called by the training thread."""

    def __init__(self) -> None:
        self._now: Update[Origin] = Update()
        self._gathered: list[Update[Origin]] = []
        self._travelling: tuple[list[Update[Origin]], Tensor, torch.Event] | None = None
        self._copied_at = time.monotonic()

    def add(self, loss: Tensor, weight: float | Tensor | None, origin: Origin) -> None:
        """A loss of the update that is being made."""
        if len(self._now.losses) >= _MOST:  # a script whose optimizer was not prepared makes no updates here
            self._now = Update()
        # A view would keep the whole tensor alive that it is a part of.
        self._now.losses.append((loss.detach().clone() if loss._is_view() else loss.detach(), weight, origin))

    def take(self) -> Update[Origin]:
        """The update that was being made; the next one begins."""
        now, self._now = self._now, Update()
        return now

    def close(self, step: int) -> list[Update[Origin]]:
        """End the update that is number `step`; those whose losses can be read now."""
        now = self._now
        if not now.losses:
            return []
        self._now = Update()
        now.step = step
        if now.losses[0][0].device.type == "cpu":
            now.values = read(now)
            return [now]
        self._gathered.append(now)
        if len(self._gathered) < _UPDATES and time.monotonic() - self._copied_at < _SECONDS:
            return []
        return self._copy()

    def rest(self) -> list[Update[Origin]]:
        """Everything that has not been read yet; waits for it."""
        return [*self._copy(), *self._arrived()]

    def _copy(self) -> list[Update[Origin]]:
        """Start the copy of what was gathered; what the copy before it brought."""
        arrived, self._copied_at = self._arrived(), time.monotonic()
        gathered, self._gathered = self._gathered, []
        if gathered:
            joined = _joined([(loss, weight) for update in gathered for loss, weight, _ in update.losses])
            ready = torch.Event(joined.device)
            values = joined.to("cpu", non_blocking=True)
            ready.record()
            self._travelling = (gathered, values, ready)
        return arrived

    def _arrived(self) -> list[Update[Origin]]:
        if self._travelling is None:
            return []
        (updates, values, ready), self._travelling = self._travelling, None
        ready.synchronize()
        numbers = iter(values.tolist())
        for update in updates:
            update.values = [next(numbers) for _ in update.losses]
        return updates


def read(update: Update[Origin]) -> list[float]:
    """The losses as numbers, now."""
    if len(update.losses) == 1 and update.losses[0][1] is None and update.losses[0][0].ndim == 0:
        return [update.losses[0][0].item()]
    values: list[float] = _joined([(loss, weight) for loss, weight, _ in update.losses]).tolist()
    return values


@torch.no_grad()
def _joined(losses: Sequence[tuple[Tensor, float | Tensor | None]]) -> Tensor:
    """The losses in one tensor. One that weighs nothing may be a mean over nothing, and counts as 0."""
    if all(weight is None and loss.ndim == 0 for loss, weight in losses):
        return torch.stack([loss for loss, _ in losses])
    parts = []
    for loss, weight in losses:
        part = loss.sum()
        if isinstance(weight, Tensor):
            part = torch.where(weight.to(loss.device).reshape(()) != 0, part, torch.zeros_like(part))
        elif weight == 0:
            part = torch.zeros_like(part)
        parts.append(part)
    return torch.stack(parts)
