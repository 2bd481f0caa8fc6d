"""EngineOptimizer: interface of optimizers whose parameters, gradients and state are held by an engine."""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import torch
from torch import Tensor

from hasten.errors import StepError
from hasten.precision.base import StepResult


class EngineOptimizer(torch.optim.Optimizer, ABC):
    """An optimizer that an engine executes.

    Its groups hold the model's parameters and the options that schedulers write; gradients and state are stored by the
    engine, so `.grad` must not be read.
    """

    num_passes: int = 0
    """Number of backward passes that have reached this engine's parameters since its gradients were last cleared."""

    @abstractmethod
    def apply(self) -> StepResult:
        """Update the parameters with the window's gradients; return whether it was applied. Ranks: every rank."""

    @abstractmethod
    def multiply_gradients(self, factor: float | Tensor) -> None:
        """Multiply the gradients of the window that ends here. Ranks: every rank."""

    def refresh(self) -> None:
        """Copy loaded weights to where the engine's forward reads them. Ranks: every rank."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # Any: torch's signature
        """Update the parameters, without returning a result. Ranks: every rank."""
        self.apply()

    def numbered_groups(self) -> list[dict[str, Any]]:
        """Return the groups with indices for parameters, counted through all groups, as in torch's state dicts."""
        numbers = itertools.count()
        return [{**group, "params": [next(numbers) for _ in group["params"]]} for group in self.param_groups]

    def __getstate__(self) -> dict[str, Any]:
        return dict(self.__dict__)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raise StepError: an engine lays out its parameters once."""
        raise StepError(
            "add_param_group() cannot add to an engine, which has laid out its parameters already; they would not be trained. "
            "Give the optimizer all groups before prepare()."
        )

    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]  # schedulers of torch look for this mark


def refuse_late_backward() -> NoReturn:
    """Raise StepError for a backward after the gradients of its window were reduced."""
    raise StepError(
        "backward() came after this window's gradients were clipped or corrected; its share would be lost. Call "
        "backward() for every loss of the window first."
    )


def put_where_used(key: str, value: Any, group: Mapping[str, Any], device: torch.device) -> Any:  # Any: a stored value
    """Return a copy of a stored value on the device where an optimizer with the group's options expects it.

    torch counts steps in host memory, except for kernels that read the count on the device.
    """
    if not isinstance(value, Tensor):
        return value
    on_host = key == "step" and not (group.get("fused") or group.get("capturable"))
    return value.detach().to("cpu" if on_host else device, copy=True)


class Placeholder(torch.optim.Optimizer):
    """Placeholder for an optimizer that an engine builds from its configuration."""

    def __init__(self, params: Any, **options: Any) -> None:  # Any: parameters or groups of them; numbers
        super().__init__(params, {key: value for key, value in options.items() if value is not None})
        self.options = {key: value for key, value in options.items() if value is not None}


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
        self.params, self.lr, self.weight_decay, self.kwargs = params, lr, weight_decay, kwargs

    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # Any: torch's signature
        """Raise StepError: the placeholder updates nothing."""
        raise StepError(
            "DummyOptim stands for an optimizer that DeepSpeed makes, so a step of its own updates nothing. Prepare it together "
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
        self.total_num_steps, self.warmup_num_steps, self.kwargs = total_num_steps, warmup_num_steps, kwargs
        self.lr_scheduler_callable = lr_scheduler_callable
        """Builds the scheduler from the engine's optimizer, in place of DeepSpeed's configuration."""
        known = {"total_num_steps": total_num_steps, "warmup_num_steps": warmup_num_steps, **kwargs}
        self.options = {key: value for key, value in known.items() if value is not None}

    def step(self) -> None:
        """Raise StepError: the placeholder has no schedule."""
        raise StepError(
            "DummyScheduler stands for a scheduler that DeepSpeed makes, so a step of its own changes nothing. Prepare it together "
            "with its optimizer under strategy='deepspeed'."
        )
