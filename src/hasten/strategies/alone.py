"""The spread of one process: the model stays as it is."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import nn

from hasten.precision.base import Precision
from hasten.runtime.context import ProcessContext
from hasten.strategies.base import Stage, Wish


class Alone:
    """Leaves models as they are: there is nobody to share them with."""

    stage = Stage.SPREAD

    def apply(self, model: nn.Module, wish: Wish, ctx: ProcessContext, precision: Precision) -> nn.Module:
        return model

    def undo(self, model: nn.Module) -> nn.Module:
        return model

    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        return nullcontext()

    def full_state_dict(self, model: nn.Module) -> dict[str, Any]:  # Any: tensors and extra state
        return dict(model.state_dict())

    def mark_forward_method(self, model: nn.Module, name: str) -> None:
        return None

    def join(self, models: list[nn.Module]) -> AbstractContextManager[None]:
        return nullcontext()
