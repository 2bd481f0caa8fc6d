"""A model under FSDP2 in a step that may have to be run again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Final

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from hasten.errors import StepError
from hasten.strategies.fsdp.gradients import HeldGradients

_RESET: Final = "reset_iter_state"


class Sharded:
    """A model under FSDP2: forward and backward gather and reduce as always."""

    meets = True

    def __init__(
        self, model: FSDPModule, held: HeldGradients, no_sync: Callable[[], AbstractContextManager[None]], syncs: bool
    ) -> None:
        self._model = model
        self._held = held
        self._no_sync = no_sync
        self._syncs = syncs
        self._put_back: Callable[[], None] = lambda: None

    def begin(self) -> None:
        self._put_back = self._held.holding(_module(self._model))

    def quiet(self, last: bool) -> AbstractContextManager[object]:
        return nullcontext() if last or not self._syncs else self._no_sync()

    def recover(self) -> None:
        reset = getattr(self._model, _RESET, None)
        if reset is None:
            raise StepError(
                f"FSDP2 of torch {torch.__version__} cannot go on after an error in the middle of a pass, so run_step() cannot run "
                "the step again; install torch 2.13 or newer, or give smaller batches."
            )
        reset()
        self._put_back()

    def put_back(self) -> None:
        self._put_back()

    def reduce(self, used: Sequence[bool]) -> None:
        return None


def _module(model: FSDPModule) -> nn.Module:
    assert isinstance(model, nn.Module), "FSDP2 wraps modules"
    return model
