"""Order in which DDP packs gradients into buckets, which determines the rounding of sums over more than two ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.parallel import DistributedDataParallel


def fix_bucket_order(ddp: DistributedDataParallel) -> None:
    """Run a backward of zeros, from which DDP takes its final bucket order: a resumed run then has the same. Ranks: every rank.

    Otherwise the first step of every process packs gradients in another order than its later steps.
    """
    if (
        ddp.static_graph
        or ddp.find_unused_parameters
        or any(getattr(module, "sparse", False) for module in ddp.modules())
    ):
        return
    model = ddp.module
    training = ddp.training
    sync = ddp.require_forward_param_sync
    parameters = []
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameters.append(parameter)
    ddp.module = _ZeroLoss(parameters)
    ddp.require_forward_param_sync = False  # no buffers to synchronise here
    try:
        with torch.enable_grad():
            # not through a subclass, which decides about buffers
            loss: Tensor = DistributedDataParallel.forward(ddp)  # type: ignore[no-untyped-call]  # torch leaves it untyped
        loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
    finally:
        ddp.module = model
        ddp.train(training)  # type: ignore[no-untyped-call]  # torch leaves it untyped
        ddp.require_forward_param_sync = sync
    for parameter in parameters:
        parameter.grad = None


class _Touch(torch.autograd.Function):
    """Pass a loss on, with a gradient of zeros for one parameter."""

    @staticmethod
    # Any: torch's context
    def forward(ctx: Any, loss: Tensor, parameter: Tensor) -> Tensor:
        ctx.save_for_backward(parameter)
        return loss.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        return gradient, torch.zeros_like(ctx.saved_tensors[0])


class _ZeroLoss(nn.Module):
    """Stand-in for the user's module, whose gradients become ready from the last parameter to the first."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        super().__init__()
        # a tuple, so that the parameters are not registered again
        self._parameters_in_order = tuple(parameters)

    def forward(self) -> Tensor:
        loss = torch.zeros((), device=self._parameters_in_order[0].device)
        for parameter in self._parameters_in_order:
            loss = _Touch.apply(loss, parameter)  # type: ignore[no-untyped-call]  # torch leaves it untyped
        return loss
