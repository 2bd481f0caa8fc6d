"""The seam for running a script's own loop without training it: to trace one step, or to time the first updates.

A script builds its Accelerators itself, so nobody can hand them anything. They ask here instead, while they are built and while they
prepare objects; whatever happens in a step was chosen by then.
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
    from hasten.accelerator.preparing import Prepared

Objects = tuple[Any, ...]  # Any: what the user prepares


class Rehearsal:
    """What Accelerators ask. As it stands here, every answer is that of ordinary training."""

    def settings(self, given: Mapping[str, Any]) -> Mapping[str, Any]:  # Any: arguments of an Accelerator
        """Return the arguments an Accelerator is built with, in place of those it was given."""
        return given

    def built(self, accelerator: Accelerator) -> None:
        """An Accelerator has been built."""

    def prepare(self, objects: Objects, done: Prepared, go_on: Callable[[Objects], Objects]) -> Objects:
        """What `prepare()` returns for `objects`; `go_on` prepares them, or others in their places.

        `done` is what the same Accelerator has prepared so far.
        """
        return go_on(objects)

    def loader(self, loader: Any, go_on: Callable[[Any], Loader]) -> Any:  # Any: loaders of any element
        """What a loader becomes when it is prepared; `go_on` prepares it, or another in its place."""
        return go_on(loader)

    def optimizer(self, optimizer: Optimizer, clock: StepClock, precision: Precision) -> PreparedOptimizer:
        """What an optimizer becomes when it is prepared."""
        return PreparedOptimizer(optimizer, clock, precision)

    def capturing(self) -> None:
        """The script gives a whole step to `capture_step()`."""

    def loss_listener(self) -> Callable[[Tensor], None] | None:
        """What is called with each loss that is sent backward; None for nothing."""
        return None


class _Place:
    """Holds the rehearsal that is going on."""

    def __init__(self) -> None:
        self.now = Rehearsal()


@cache  # scripts build Accelerators where nothing can be passed in, so the process must hold what they ask
def _place() -> _Place:
    return _Place()


def current() -> Rehearsal:
    """Return the rehearsal that is going on, or one that changes nothing."""
    return _place().now


@contextmanager
def rehearsing(rehearsal: Rehearsal) -> Iterator[None]:
    """Context manager in which every Accelerator of this process that is built asks `rehearsal`."""
    place = _place()
    before, place.now = place.now, rehearsal
    try:
        yield
    finally:
        place.now = before
