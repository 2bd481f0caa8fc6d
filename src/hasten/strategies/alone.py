"""The spread of one process: the model stays as it is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor, nn

from hasten.precision.base import Precision
from hasten.runtime.context import ProcessContext
from hasten.strategies.base import LoopState, Stage, Wish
from hasten.strategies.retry import Retry, Whole


class Alone:
    """Leaves models as they are: there is nobody to share them with."""

    stage = Stage.SPREAD

    def __init__(self, retries: bool = True) -> None:
        self._retries = retries

    def apply(self, model: nn.Module, wish: Wish, ctx: ProcessContext, precision: Precision) -> nn.Module:
        return model

    def undo(self, model: nn.Module) -> nn.Module:
        return model

    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        return nullcontext()

    def retry(self, model: nn.Module, boundary: bool) -> Retry | None:
        return Whole() if self._retries else None

    def full_state_dict(self, model: nn.Module) -> dict[str, Any]:  # Any: tensors and extra state
        return dict(model.state_dict())

    def mark_forward_method(self, model: nn.Module, name: str) -> None:
        return None

    def join(self, models: list[nn.Module]) -> AbstractContextManager[None]:
        return nullcontext()

    def unsettled(self, model: nn.Module) -> Callable[[], object] | None:
        return None

    def loop_state(self, model: nn.Module, names: Mapping[int, str], open_window: bool) -> LoopState:
        return LoopState()

    def restore_loop_state(self, model: nn.Module, names: Mapping[int, str], state: LoopState) -> Tensor | None:
        return None
