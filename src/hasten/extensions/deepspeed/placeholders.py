"""Placeholders for the optimizer and the scheduler that DeepSpeed builds from its configuration."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hasten.errors import StepError
from hasten.optim.engine import Placeholder


class DummyOptim(Placeholder):
    """Placeholder for the optimizer in DeepSpeed's configuration; its options fill the "auto" values there."""

    def __init__(
        self,
        params: Any,  # Any: parameters, or groups of them
        lr: float = 0.001,
        weight_decay: float = 0.0,
        **kwargs: Any,  # Any: further options, such as betas and eps
    ) -> None:
        super().__init__(params, lr=lr, weight_decay=weight_decay, **kwargs)
        self.params = params
        self.lr = lr
        self.weight_decay = weight_decay
        self.kwargs = kwargs

    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # Any: torch's signature
        """Raise StepError: the placeholder updates nothing."""
        raise StepError(
            "DummyOptim stands for an optimizer that DeepSpeed makes, so its step updates nothing. Prepare it together "
            "with its model under strategy='deepspeed'."
        )


class DummyScheduler:
    """Placeholder for the scheduler in DeepSpeed's configuration; its options fill the "auto" values there."""

    def __init__(
        self,
        optimizer: Any,  # Any: the optimizer or its placeholder
        total_num_steps: int | None = None,
        warmup_num_steps: int = 0,
        lr_scheduler_callable: Callable[[Any], Any] | None = None,
        **kwargs: Any,  # Any: further options of the scheduler
    ) -> None:
        self.optimizer = optimizer
        self.total_num_steps = total_num_steps
        self.warmup_num_steps = warmup_num_steps
        self.kwargs = kwargs
        self.lr_scheduler_callable = lr_scheduler_callable
        """Builds the scheduler from the engine's optimizer, in place of DeepSpeed's configuration."""
        named_options = {
            "total_num_steps": total_num_steps,
            "warmup_num_steps": warmup_num_steps,
            **kwargs,
        }
        options = {}
        for option_name, option_value in named_options.items():
            if option_value is not None:
                options[option_name] = option_value
        self.options = options

    def step(self) -> None:
        """Raise StepError: the placeholder has no schedule."""
        raise StepError(
            "DummyScheduler stands for a scheduler that DeepSpeed makes, so its step changes nothing. Prepare it together "
            "with its optimizer under strategy='deepspeed'."
        )
