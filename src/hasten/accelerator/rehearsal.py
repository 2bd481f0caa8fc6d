"""Extension point for running a script's loop without full training: to trace one step, or to time the first updates.

A script creates its Accelerators itself, so nothing can be passed to them. Instead, they query the current rehearsal during
construction and in `prepare()`; these calls determine everything that a step does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.optim import Optimizer

from hasten.data.loader import Loader
from hasten.optim.clock import StepClock
from hasten.optim.optimizer import PreparedOptimizer
from hasten.precision.base import Precision

if TYPE_CHECKING:
    from hasten.accelerator.facade import Accelerator
    from hasten.accelerator.preparing import PreparedObjects

Objects = tuple[Any, ...]  # Any: the user's objects


class Rehearsal:
    """Hooks that Accelerators call; the base class leaves training unchanged."""

    def settings(self, given: Mapping[str, Any]) -> Mapping[str, Any]:  # Any: arguments of an Accelerator
        """Return the arguments that replace those given to an Accelerator."""
        return given

    def built(self, accelerator: Accelerator) -> None:
        """Handle the construction of an Accelerator."""

    def prepare(self, objects: Objects, done: PreparedObjects, go_on: Callable[[Objects], Objects]) -> Objects:
        """Return the result of `prepare()` for `objects`; `go_on` prepares them, or replacements.

        `done` holds the objects that the same Accelerator has prepared so far.
        """
        return go_on(objects)

    def loader(self, loader: Any, go_on: Callable[[Any], Loader]) -> Any:  # Any: loaders of any element
        """Return the prepared form of a loader; `go_on` prepares it, or a replacement."""
        return go_on(loader)

    def optimizer(self, optimizer: Optimizer, clock: StepClock, precision: Precision) -> PreparedOptimizer:
        """Return the prepared form of an optimizer."""
        return PreparedOptimizer(optimizer, clock, precision)

    def capturing(self) -> None:
        """Handle a call of `capture_step()`."""

    def loss_listener(self) -> Callable[[Tensor], None] | None:
        """Return a function to call with each loss that is backpropagated, or None."""
        return None


class _Place:
    """Holder of the active rehearsal."""

    def __init__(self) -> None:
        self.now = Rehearsal()


@cache  # scripts create Accelerators without arguments from hasten, so the rehearsal is process-wide
def _place() -> _Place:
    return _Place()


def current() -> Rehearsal:
    """Return the active rehearsal, or one that changes nothing."""
    return _place().now


@contextmanager
def rehearsing(rehearsal: Rehearsal) -> Iterator[None]:
    """Context manager in which every Accelerator created in this process uses `rehearsal`."""
    place = _place()
    before, place.now = place.now, rehearsal
    try:
        yield
    finally:
        place.now = before
