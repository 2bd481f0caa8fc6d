"""The accumulate() block: one micro-step of a window, synchronising gradients only where the window ends."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack
from types import TracebackType

from torch import nn

from hasten.optim.clock import Key, StepClock
from hasten.strategies.base import Strategy


class Accumulation:
    """One micro-step after another over the same models.

    Written as a class and made once, because a generator, or a new object for every micro-step, would cost more than
    the rest of the step's overhead.
    """

    __slots__ = ("_clock", "_key", "_models", "_quiet", "_strategy", "_syncs", "entered")

    def __init__(
        self, clock: StepClock, strategy: Strategy, models: Sequence[nn.Module], key: Key, sync_each_batch: bool
    ) -> None:
        self.entered = False
        """Inside its block now; a block within a block needs an object of its own."""
        self._clock = clock
        self._strategy = strategy
        self._models = models
        self._key = key
        self._syncs = strategy.caps.synchronises and not sync_each_batch
        self._quiet: AbstractContextManager[object] | None = None

    def __enter__(self) -> None:
        self.entered = True
        if self._clock.tick(self._key) or not self._syncs:
            return
        if len(self._models) == 1:  # the common case, without the price of a stack
            quiet: AbstractContextManager[object] = self._strategy.no_sync(self._models[0])
            quiet.__enter__()
        else:
            quiet = stack = ExitStack()
            for model in self._models:
                stack.enter_context(self._strategy.no_sync(model))
        self._quiet = quiet

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.entered = False
        quiet = self._quiet
        if quiet is not None:
            self._quiet = None
            quiet.__exit__(kind, error, trace)
        if error is not None:
            self._clock.interrupt(self._key)
