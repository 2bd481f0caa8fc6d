"""The prepared scheduler: a real LRScheduler that steps once per applied update."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler

from hasten.optim.optimizer import PreparedOptimizer


class PreparedScheduler(LRScheduler):
    """The user's scheduler, following its optimizer's updates.

    A call of `step` counts only when the optimizer was updated since the last one that did, so the schedule is the
    same on any number of processes, under accumulation, and when fp16 skips an update. Before training
    begins a call counts as it does in torch.
    """

    def __init__(self, inner: Any, optimizer: PreparedOptimizer | None, follow: bool = True) -> None:
        # Any: ReduceLROnPlateau and foreign schedulers share no base class with the others.
        # LRScheduler.__init__ is not called: it would take a first step and write to the optimizer's groups.
        self.scheduler = inner
        self._follows = optimizer if follow else None
        self._seen = 0 if optimizer is None else optimizer.num_updates

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Advance the schedule if the optimizer was updated since it last advanced."""
        optimizer = self._follows
        if optimizer is not None and (optimizer.num_attempts or not optimizer.untouched):
            if optimizer.num_updates == self._seen:
                return
            self._seen = optimizer.num_updates
        self.scheduler.step(*args, **kwargs)

    def get_last_lr(self) -> list[float | Tensor]:
        """The learning rate of each group."""
        rates: list[float | Tensor] = self.scheduler.get_last_lr()
        return rates

    def get_lr(self) -> Any:
        """The inner scheduler's next learning rates."""
        return self.scheduler.get_lr()

    def state_dict(self) -> dict[str, Any]:
        """The inner scheduler's state."""
        state: dict[str, Any] = self.scheduler.state_dict()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the inner scheduler's state."""
        self.scheduler.load_state_dict(state_dict)

    def __getattr__(self, name: str) -> Any:  # Any: whatever the inner scheduler has
        if name == "scheduler":  # not there yet while unpickling or copying
            raise AttributeError(name)
        return getattr(self.scheduler, name)

    def __repr__(self) -> str:
        return f"PreparedScheduler({self.scheduler!r})"
