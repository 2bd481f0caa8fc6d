"""The accumulate() block: one micro-step of a window, synchronising gradients only where the window ends."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack
from types import TracebackType

from torch import nn

from hasten.errors import StepError
from hasten.optim.clock import StepClock
from hasten.optim.window import Key
from hasten.strategies.base import Strategy


class Accumulation:
    """One micro-step after another over the same models.

    A block inside another one, over other models, is part of the outer micro-step: both are one window.
    Written as a class and made once, because a generator, or a new object for every micro-step, would cost more than
    the rest of the step's overhead.
    """

    __slots__ = ("_clock", "_hidden", "_key", "_models", "_quiet", "_strategy", "_syncs", "entered")

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
        self._hidden = strategy.caps.hides_gradients
        self._quiet: AbstractContextManager[object] | None = None

    def __enter__(self) -> None:
        clock = self._clock
        if clock.inside:
            boundary = self._enter_nested()
        else:
            boundary = clock.tick(self._key)
            clock.inside.append((self._key, self._models))
        self.entered = True
        # Optimizers that share a window must see what every backward has added to their gradients.
        if boundary or not self._syncs or (self._hidden and clock.crowded):
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
        inside = self._clock.inside
        for index in range(len(inside) - 1, -1, -1):
            if inside[index][1] is self._models:
                del inside[index]
                break
        if error is not None and not inside:
            self._clock.interrupt(self._key)

    def _enter_nested(self) -> bool:
        """Join the micro-step of the block around this one; whether it ends its window."""
        clock = self._clock
        for _, models in clock.inside:
            for model in self._models:
                if any(model is other for other in models):
                    raise StepError(
                        f"accumulate() was entered for {type(model).__name__} inside an accumulate() block for the "
                        "same model; one micro-step would count twice and the update would come too early. Remove "
                        "the inner block."
                    )
        if clock.is_open(self._key):
            raise StepError(
                f"accumulate() for {type(self._models[0]).__name__} was entered inside another model's block, but a "
                "window of its own is still open; its gradients would belong to two windows. Nest the blocks in "
                "every micro-step or in none, or use accumulate(first, second)."
            )
        clock.inside.append((self._key, self._models))
        return clock.boundary
