"""Local SGD: ranks train independently and average their parameters every few updates."""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack
from types import TracebackType
from typing import Any, Protocol, Self

import torch
from torch import Tensor, nn

from hasten.comm.base import ReduceKind
from hasten.errors import ArgumentError, ConfigError
from hasten.optim.clock import StepClock


class TrainingAccelerator(Protocol):
    """The members of an Accelerator that Local SGD uses."""

    @property
    def sync_gradients(self) -> bool: ...
    @property
    def num_processes(self) -> int: ...
    @property
    def _clock(self) -> StepClock: ...
    def no_sync(self, model: nn.Module) -> AbstractContextManager[Any]: ...
    def reduce(self, tensor: Any, reduction: ReduceKind = "sum") -> Any: ...


class LocalSGD:
    """Context manager in which gradients stay local and parameters are averaged every `local_sgd_steps` updates.

    ```python
    with LocalSGD(accelerator=accelerator, model=model, local_sgd_steps=8) as local_sgd:
        for batch in loader:
            ...
            optimizer.step()
            local_sgd.step()
    ```
    Parameters are averaged once more when the block ends without an error, so every rank ends with the same model.
    """

    def __init__(
        self,
        accelerator: TrainingAccelerator,
        model: nn.Module,
        local_sgd_steps: int,
        enabled: bool = True,
    ) -> None:
        if not hasattr(accelerator, "_clock"):
            raise ArgumentError(
                f"LocalSGD(accelerator={accelerator!r}) got a {type(accelerator).__name__}, which runs no training. Give the Accelerator."
            )
        num_steps: object = local_sgd_steps
        if (
            isinstance(num_steps, bool)
            or not isinstance(num_steps, int)
            or num_steps < 1
        ):
            raise ConfigError(
                f"local_sgd_steps={local_sgd_steps!r} is not a whole number of at least 1; parameters would never be averaged. "
                "Set it to the number of updates between two averages, e.g. 8."
            )
        self.enabled = enabled and accelerator.num_processes > 1
        self.num_steps = 0
        """Number of updates since the start of the block."""
        self._accelerator = accelerator
        self._model = model
        self._every = local_sgd_steps
        self._stack = ExitStack()
        self._averaged_at = 0

    def __enter__(self) -> Self:
        if self.enabled:
            # permanently: the optimizer's state is never averaged
            self._accelerator._clock.trains_separately = True
            self._stack.enter_context(self._accelerator.no_sync(self._model))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.close()
        if self.enabled and error is None and self._averaged_at != self.num_steps:
            self._average_parameters()

    def step(self) -> None:
        """Count an update, and average when due; does nothing off the boundary of an accumulation window.

        Ranks: every rank.
        """
        if not self._accelerator.sync_gradients:
            return
        self.num_steps += 1
        if self.enabled and self.num_steps % self._every == 0:
            self._average_parameters()

    @torch.no_grad()
    def _average_parameters(self) -> None:
        parameters_by_kind: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
        for parameter in self._model.parameters():
            if parameter.requires_grad:
                parameters_by_kind.setdefault(
                    (parameter.device, parameter.dtype), []
                ).append(parameter)
        # one collective per dtype, not one per parameter
        for parameters_of_kind in parameters_by_kind.values():
            flat_mean = self._accelerator.reduce(
                torch.cat([p.reshape(-1) for p in parameters_of_kind]), reduction="mean"
            )
            for old, mean in zip(
                parameters_of_kind,
                flat_mean.split([p.numel() for p in parameters_of_kind]),
                strict=True,
            ):
                old.copy_(mean.view_as(old))
        self._averaged_at = self.num_steps
