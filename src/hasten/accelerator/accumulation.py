"""The accumulate() block: one micro-step of a window, synchronising gradients only where the window ends."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from types import TracebackType

from torch import nn

from hasten.optim.clock import Key, StepClock
from hasten.strategies.base import Strategy


class Accumulation:
    """One micro-step. Written as a class because a generator would cost more than the rest of the step's overhead."""

    __slots__ = ("_clock", "_each", "_key", "_models", "_stack", "_strategy")

    def __init__(
        self, clock: StepClock, strategy: Strategy, models: Sequence[nn.Module], key: Key, sync_each_batch: bool
    ) -> None:
        self._clock = clock
        self._strategy = strategy
        self._models = models
        self._key = key
        self._each = sync_each_batch
        self._stack: ExitStack | None = None

    def __enter__(self) -> None:
        if self._clock.tick(self._key) or self._each:
            return
        self._stack = ExitStack()
        for model in self._models:
            self._stack.enter_context(self._strategy.no_sync(model))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._stack is not None:
            self._stack.close()
