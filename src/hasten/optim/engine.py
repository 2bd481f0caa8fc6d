"""Optimizers whose state an engine holds, and the contents of an optimizer's groups."""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

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
        return [
            {**param_group, "params": [next(numbers) for _ in param_group["params"]]}
            for param_group in self.param_groups
        ]

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


# Any: a stored value
def put_where_used(
    key: str, value: Any, group: Mapping[str, Any], device: torch.device
) -> Any:
    """Return a copy of a stored value on the device where an optimizer with the group's options expects it.

    torch counts steps in host memory, except for kernels that read the count on the device.
    """
    if not isinstance(value, Tensor):
        return value
    on_host = key == "step" and not (group.get("fused") or group.get("capturable"))
    return value.detach().to("cpu" if on_host else device, copy=True)


class Placeholder(torch.optim.Optimizer):
    """Placeholder for an optimizer that an engine builds from its configuration."""

    # Any: parameters or groups of them; numbers
    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(
            params, {key: value for key, value in options.items() if value is not None}
        )
        self.options = {
            key: value for key, value in options.items() if value is not None
        }


# Any: options of an optimizer
def list_parameters(param_groups: Iterable[Mapping[str, Any]]) -> list[nn.Parameter]:
    """Return the parameters of all groups, in order."""
    parameters: list[nn.Parameter] = []
    for group in param_groups:
        parameters += group["params"]
    return parameters


def options_of(param_group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a group, without its parameters."""
    options = dict(param_group)
    del options["params"]
    return options


def list_groups_of_parameters(
    param_groups: Iterable[Mapping[str, Any]],
) -> list[Mapping[str, Any]]:
    """Return the group of each parameter, in the order of `list_parameters`."""
    groups_of_parameters: list[Mapping[str, Any]] = []
    for group in param_groups:
        groups_of_parameters += [group] * len(group["params"])
    return groups_of_parameters
