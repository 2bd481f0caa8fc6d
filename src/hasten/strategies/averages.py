"""Averages of weights (EMA, SWA) kept by torch's AveragedModel beside a sharded model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim.swa_utils import AveragedModel

from hasten.errors import PrepareError


def guard_averages() -> None:
    """Let an AveragedModel that was left out of `prepare` name the cure when a sharded model is averaged into it."""
    update = AveragedModel.update_parameters
    if not hasattr(update, "__wrapped__"):
        AveragedModel.update_parameters = _guarded(update)  # type: ignore[method-assign]  # torch offers no hook


def _guarded(update: Callable[..., Any]) -> Callable[..., Any]:  # Any: torch leaves it untyped
    def update_parameters(self: AveragedModel, model: nn.Module) -> None:
        if _is_sharded(model) and not _is_sharded(self):
            raise PrepareError(
                "an AveragedModel that prepare() was not given is updated from a sharded model; its weights are whole "
                "and the model's are in shards, so they cannot be averaged. Create the AveragedModel before prepare() "
                "and pass both in one call: model, averaged = accelerator.prepare(model, averaged)."
            )
        update(self, model)

    update_parameters.__wrapped__ = update  # type: ignore[attr-defined]  # so that it is done once
    return update_parameters


def _is_sharded(model: nn.Module) -> bool:
    return any(isinstance(parameter, DTensor) for parameter in model.parameters())
