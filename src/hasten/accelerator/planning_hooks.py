"""Extension point for running a script's loop without full training: to trace one step, or to time the first updates.

A script creates its Accelerators itself, so nothing can be passed to them. Instead, they query the current rehearsal during
construction and in `prepare()`; these calls determine everything that a step does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any

from torch.optim import Optimizer

from hasten.data.loader import Loader
from hasten.optim.clock import StepClock
from hasten.optim.optimizer import PreparedOptimizer
from hasten.precision.base import Precision
from hasten.prepare_args import PreparedObjects

Objects = tuple[Any, ...]  # Any: the user's objects


class AcceleratorHooks:
    """Hooks that Accelerators call; the base class leaves training unchanged."""

    def settings(self, given: Mapping[str, Any]) -> Mapping[str, Any]:  # Any: arguments of an Accelerator
        """Return the arguments that replace those given to an Accelerator."""
        return given

    def built(self, accelerator: Any) -> None:  # Any: an Accelerator, whose module imports this one
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


@cache  # scripts create Accelerators without arguments from hasten, so the rehearsal is process-wide
def _active() -> list[AcceleratorHooks]:
    return []


def current() -> AcceleratorHooks | None:
    """Return the active rehearsal; None in a normal run."""
    active = _active()
    return active[-1] if active else None


@contextmanager
def rehearsing(rehearsal: AcceleratorHooks) -> Iterator[None]:
    """Context manager in which every Accelerator created in this process uses `rehearsal`."""
    _active().append(rehearsal)
    try:
        yield
    finally:
        _active().pop()
