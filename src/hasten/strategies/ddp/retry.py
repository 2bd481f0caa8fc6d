"""A model under DDP in a step that may have to be run again."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.parallel import DistributedDataParallel

from hasten.errors import StepError
from hasten.strategies.ddp.buckets import through


class Replica:
    """A model under DDP: passes add up gradients of this rank only, and one reduction follows when all ranks are done.

    DDP cannot go on after an error while it reduces, so nothing is reduced before every rank has finished its passes.
    """

    meets = False

    def __init__(self, model: DistributedDataParallel) -> None:
        if model.static_graph:
            raise StepError(
                "run_step() is not possible with DistributedDataParallelKwargs(static_graph=True): DDP then expects the same passes "
                "in every step, and a step that is run again has others. Leave static_graph out."
            )
        self._ddp: Any = model  # Any: what is used of the wrapper is not public in torch
        self._reduces = True

    def begin(self) -> None:
        ddp = self._ddp
        self._reduces = ddp.require_backward_grad_sync
        if ddp.reducer is not None:
            ddp.reducer._rebuild_buckets()
        if ddp.will_sync_module_buffers():
            with torch.no_grad():
                ddp._sync_buffers()
        ddp.require_forward_param_sync = False

    def quiet(self, last: bool) -> AbstractContextManager[object]:
        block: AbstractContextManager[object] = self._ddp.no_sync()
        return block

    def recover(self) -> None:
        return None

    def put_back(self) -> None:
        return None

    def reduce(self, used: Sequence[bool]) -> None:
        parameters = [p for p in self._ddp.module.parameters() if p.requires_grad]
        if not self._reduces or not any(used):
            return
        for parameter in parameters:
            if parameter.grad is not None and parameter.grad.is_sparse:
                raise StepError(
                    "run_step() reduces dense gradients only under DDP, and a parameter has a sparse one; its rows would be lost. "
                    "Use sparse=False in the embedding, or backward() without run_step()."
                )
        loss = through(self._ddp, _Touching(parameters[::-1]))
        loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        for parameter, wanted in zip(parameters, used, strict=True):
            if not wanted:
                parameter.grad = None
        self._ddp.require_forward_param_sync = True


class _Touch(torch.autograd.Function):
    """Zero, whose backward adds zeros to the gradients of all parameters: DDP then takes them for this step's."""

    @staticmethod
    def forward(ctx: Any, *parameters: Tensor) -> Tensor:  # Any: torch's own record
        ctx.save_for_backward(*parameters)
        return torch.zeros((), device=parameters[0].device)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        return tuple(p.new_zeros(()).expand(p.shape) for p in ctx.saved_tensors)


class _Touching(nn.Module):
    """Stands for the user's module in a forward of DDP."""

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        super().__init__()
        self._touched = tuple(parameters)  # a tuple, so that they are not registered a second time

    def forward(self) -> Tensor:
        result: Tensor = _Touch.apply(*self._touched)  # type: ignore[no-untyped-call]  # torch leaves it untyped
        return result
