"""The prepared scheduler: an LRScheduler that steps once per applied update."""

from __future__ import annotations

import copy
import functools
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

from torch import Tensor
from torch.optim import lr_scheduler as torch_schedules
from torch.optim.lr_scheduler import LRScheduler

from hasten.optim.optimizer import PreparedOptimizer


class PreparedScheduler(LRScheduler):
    """Wrapper of the user's scheduler that follows its optimizer's updates.

    A call of `step` counts only if the optimizer was updated since the last one that counted, so the schedule is the
    same with any world size, under accumulation, and when fp16 skips an update. Before training starts, a call
    counts as it does in torch.
    """

    def __init__(
        self, inner: Any, optimizer: PreparedOptimizer | None, follow: bool = True
    ) -> None:
        # Any: ReduceLROnPlateau and third-party schedulers share no base class with the others.
        # LRScheduler.__init__ is not called: it would take a first step and write to the optimizer's groups.
        self.scheduler = inner
        self._follows = optimizer if follow else None
        self._seen = 0 if optimizer is None else optimizer.num_updates
        self.length = schedule_length(inner)
        """Number of steps of the whole schedule, if known."""
        self._initial_state = None if self.length is None else _copy_state(inner)

    def continue_at(self, num_steps: int) -> None:
        """Let the schedule of this script, whose length is known, continue after `num_steps` steps."""
        assert self._initial_state is not None, "the length is known"
        state, rates = copy.deepcopy(self._initial_state)
        self.scheduler.load_state_dict(state)
        for param_group, rate in zip(
            self.scheduler.optimizer.param_groups, rates, strict=False
        ):
            if isinstance(param_group["lr"], Tensor):
                param_group["lr"].fill_(rate)
            else:
                param_group["lr"] = rate
        # torch warns of steps before the optimizer's first one
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for _ in range(num_steps):
                self.scheduler.step()

    @property
    def steps_each_batch(self) -> bool:
        """True if every call of `step` counts, whether or not the optimizer was updated."""
        return self._follows is None

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Advance the schedule if the optimizer was updated since the last advance."""
        optimizer = self._follows
        if optimizer is not None and (
            optimizer.num_attempts or not optimizer.untouched
        ):
            if optimizer.num_updates == self._seen:
                return
            self._seen = optimizer.num_updates
        self.scheduler.step(*args, **kwargs)

    def caught_up(self) -> None:
        """Count the optimizer's updates so far as seen: the schedule was loaded together with the optimizer."""
        self._seen = 0 if self._follows is None else self._follows.num_updates

    def get_last_lr(self) -> list[float | Tensor]:
        """Return the learning rate of each group."""
        rates: list[float | Tensor] = self.scheduler.get_last_lr()
        return rates

    def get_lr(self) -> Any:
        """Return the inner scheduler's next learning rates."""
        return self.scheduler.get_lr()

    def state_dict(self) -> dict[str, Any]:
        """Return the inner scheduler's state."""
        state: dict[str, Any] = self.scheduler.state_dict()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the inner scheduler's state."""
        self.scheduler.load_state_dict(state_dict)

    def __getattr__(self, name: str) -> Any:  # Any: attributes of the inner scheduler
        if name == "scheduler":  # absent while unpickling or copying
            raise AttributeError(name)
        return getattr(self.scheduler, name)

    def __repr__(self) -> str:
        return f"PreparedScheduler({self.scheduler!r})"


# Any in this file: schedulers of torch and of other libraries share no base class.


def _copy_state(scheduler: Any) -> tuple[dict[str, Any], list[float]]:
    """Return the state of a schedule that has not begun, and the learning rates it has set."""
    rates = [
        float(param_group["lr"]) for param_group in scheduler.optimizer.param_groups
    ]
    return copy.deepcopy(scheduler.state_dict()), rates


def steps_reached(
    num_steps: int, saved_length: int, length: int, epochs: Iterable[tuple[int, int]]
) -> int:
    """Return the position in a schedule of `length` steps that corresponds to `num_steps` of `saved_length`.

    `epochs` are the updates of an epoch, and those of it that are left, of each loader that is inside an epoch. They tell
    the position exactly where the steps of one schedule fall between two of the other.
    """
    reached = num_steps * length // saved_length
    for num_updates, num_left in epochs:
        reached = max(
            reached, reached // num_updates * num_updates + num_updates - num_left
        )
    return min(reached, length)


_LENGTHS: Final = (
    (torch_schedules.OneCycleLR, "total_steps"),
    (torch_schedules.CosineAnnealingLR, "T_max"),
    (torch_schedules.PolynomialLR, "total_iters"),
)

_MOST_EPOCHS: Final = 100
"""A total of more epochs than this is more likely a round number than a number of epochs."""


def schedule_length(scheduler: Any) -> int | None:
    """Return the number of steps after which a schedule ends; None if it has no end, or only warms up."""
    if isinstance(scheduler, torch_schedules.SequentialLR):
        last_length = schedule_length(scheduler._schedulers[-1])
        if last_length is None:
            return None
        return last_length + int(scheduler.state_dict()["_milestones"][-1])
    if isinstance(scheduler, torch_schedules.LinearLR):
        if scheduler.end_factor < scheduler.start_factor:
            return int(scheduler.total_iters)
        return None
    lengths: list[object] = []
    if isinstance(scheduler, torch_schedules.LambdaLR):
        for function in scheduler.lr_lambdas:
            # transformers' functions have the length as an argument
            if isinstance(function, functools.partial):
                lengths.append(function.keywords.get("num_training_steps"))
    for kind, name in _LENGTHS:
        if isinstance(scheduler, kind):
            lengths.append(getattr(scheduler, name))
    for length in lengths:
        if isinstance(length, int | float):
            return int(length)
    return None


@dataclass(frozen=True, slots=True)
class LoopLength:
    """Batches of an epoch, from which a schedule's number of steps follows."""

    num_batches: int
    """Batches of the loader before it was prepared."""
    num_prepared: int
    """Batches of the prepared loader on one process."""
    num_processes: int
    every: int
    """Batches per update."""
    ends_with_epoch: bool = True
    """True if the end of an epoch ends the accumulation window."""

    def num_updates(self, epochs: int) -> int:
        """Return the number of updates in so many epochs."""
        if self.ends_with_epoch:
            return -(-self.num_prepared // self.every) * epochs
        return self.num_prepared * epochs // self.every


def explain_wrong_length(scheduler: Any, length: LoopLength) -> str | None:
    """Return a message if a schedule has a step for each batch, or for each update of one process, of whole epochs; else None."""
    num_steps = schedule_length(scheduler)
    if not num_steps or not length.num_prepared:
        return None
    epochs = _whole_epochs(num_steps, length.num_batches, 1) or _whole_epochs(
        num_steps, length.num_batches, length.every
    )
    if not 0 < epochs <= _MOST_EPOCHS or not _differ_by_factor(
        num_steps, length.num_updates(epochs)
    ):
        return None
    formula = f"{length.num_prepared} batches on each of {length.num_processes} process(es), gradient_accumulation_steps={length.every}"
    message = (
        f"{type(scheduler).__name__} was made for {num_steps} steps: {epochs} epoch(s) of a loader of {length.num_batches} batches. A schedule steps once "
        f"per update, and an epoch has ceil({length.num_prepared} / {length.every}) = {length.num_updates(1)} update(s) ({formula}), so a run of "
        f"{epochs} epoch(s) would end at step {length.num_updates(epochs)} of {num_steps}. Prepare the loader first, and make the schedule for "
        f"accelerator.num_updates(loader, epochs={epochs}) steps."
    )
    if num_steps % length.num_updates(1):
        return message
    return f"{message} If you train for {num_steps // length.num_updates(1)} epochs, {num_steps} is right; made that way, this is not asked."


def _differ_by_factor(total: int, num_updates: int) -> bool:
    """Return whether processes or accumulation were forgotten, rather than how the last window of an epoch is counted."""
    return max(total, num_updates) >= 1.5 * min(total, num_updates)


def _whole_epochs(total: int, num_batches: int, every: int) -> int:
    """Return the whole number of epochs that has this many steps; 0 if there is none."""
    epochs = round(total * every / num_batches)
    fits = (
        num_batches * epochs // every,
        -(-num_batches * epochs // every),
        -(-num_batches // every) * epochs,
        num_batches // every * epochs,
    )
    return epochs if total in fits else 0
