"""AcceleratedScheduler: hasten's prepared scheduler, with the established way to count."""

from __future__ import annotations

import warnings
from typing import Any

from accelerate._impl.ambient import AMBIENT
from accelerate._impl.surface.shown import shown_property
from accelerate._impl.views.state import AcceleratorState, GradientState
from hasten.optim.optimizer import PreparedOptimizer
from hasten.optim.scheduler import PreparedScheduler

# Any in this file: schedulers share no base class.


class AcceleratedScheduler(PreparedScheduler):
    """The user's scheduler, following its optimizers' updates, once per process unless batches are split."""

    def __init__(
        self,
        scheduler: Any,
        optimizers: Any,
        step_with_optimizer: bool = True,
        split_batches: bool = False,
    ) -> None:
        if isinstance(optimizers, list | tuple):
            self.optimizers = optimizers
        else:
            self.optimizers = [optimizers]
        owner = None
        for optimizer in self.optimizers:
            if isinstance(optimizer, PreparedOptimizer):
                owner = optimizer
                break
        super().__init__(scheduler, owner, step_with_optimizer)
        self.split_batches = split_batches
        self.step_with_optimizer = step_with_optimizer

    gradient_state = shown_property(
        lambda self: GradientState(), "The view on the current window."
    )

    def step(self, *args: Any, **kwargs: Any) -> None:
        if not self.step_with_optimizer:
            self.scheduler.step(*args, **kwargs)
            return
        state = self.gradient_state
        if not state.sync_gradients:
            if state.adjust_scheduler:  # quirk: SCHEDULER_COUNTS_MICRO_STEPS
                self.scheduler._step_count += 1
            return
        if not any(
            getattr(optimizer, "step_was_skipped", False)
            for optimizer in self.optimizers
        ):
            self._advance_schedule(*args, **kwargs)

    def _advance_schedule(self, *args: Any, **kwargs: Any) -> None:
        """Step as often as an update counts, up to the end of a schedule that has one."""
        for _ in range(self._num_steps()):
            if (
                hasattr(self.scheduler, "total_steps")
                and self.scheduler._step_count > self.scheduler.total_steps
            ):
                return
            if getattr(self.scheduler, "_step_count", 1) > 1:
                self.scheduler.step(*args, **kwargs)
                continue
            # torch does not see the inner optimizer's step and warns at the first
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="Detected call of")
                self.scheduler.step(*args, **kwargs)

    def _num_steps(self) -> int:
        if self.split_batches:  # quirk: SCHEDULER_TIMES_PROCESSES
            return 1
        sizes = AMBIENT.whole.get("parallelism_config")
        # which share batches
        return AcceleratorState().num_processes // (
            1 if sizes is None else int(sizes.sp_size)
        )
