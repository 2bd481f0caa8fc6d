"""Transforms that move a model to the process's device and convert it to the run's precision."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from itertools import chain
from typing import ClassVar

import torch
from torch import nn

from hasten.config.sections.loop import MasterWeights
from hasten.errors import PrepareError
from hasten.modules.forwarding import is_dispatched
from hasten.modules.hooks import hook_of
from hasten.precision.base import Precision
from hasten.runtime.context import ProcessContext
from hasten.strategies.base import PrepareRequest, Stage

log = logging.getLogger(__name__)


class PlaceOnDevice:
    """Transform that moves parameters and buffers to the device; optimizers keep pointing to the same parameters."""

    stage = Stage.PLACE

    def apply(
        self,
        model: nn.Module,
        request: PrepareRequest,
        ctx: ProcessContext,
        precision: Precision,
    ) -> nn.Module:
        expected_types = {ctx.device.type} if ctx.device.type == "cpu" else set[str]()
        device_types = set[str]()
        for tensor in chain(model.parameters(), model.buffers()):
            device_types.add(tensor.device.type)
        # hooks bring offloaded weights
        if "meta" in device_types and all(
            hook_of(module) is None for module in model.modules()
        ):
            refuse_meta(model)
        # the code that loaded the model has already spread it over devices
        if (
            device_types == expected_types
            or not request.place
            or hasattr(model, "hf_device_map")
            or is_dispatched(model)
        ):
            return model
        return model.to(ctx.device)

    def undo(self, model: nn.Module) -> nn.Module:
        return model


def refuse_meta(model: nn.Module) -> None:
    """Raise PrepareError if parameters of the model have no values."""
    on_meta = [
        parameter_name
        for parameter_name, parameter in model.named_parameters()
        if parameter.is_meta
    ]
    if on_meta:
        raise PrepareError(
            f"parameter {on_meta[0]!r} and {len(on_meta) - 1} more are on the meta device and have no values to "
            "train. Load them first with load_checkpoint_in_model(model, folder), or use strategy='fsdp', which initializes meta "
            "parameters."
        )


@dataclass(slots=True)
class Convert:
    """Transform that makes the model compute in the run's precision."""

    stage: ClassVar[Stage] = Stage.CONVERT
    masters: MasterWeights = "fp32"
    _precision: Precision | None = None

    def apply(
        self,
        model: nn.Module,
        request: PrepareRequest,
        ctx: ProcessContext,
        precision: Precision,
    ) -> nn.Module:
        if precision.spec == "no":
            return model
        self._precision = precision
        if request.train and self.masters == "fp32":
            give_masters(model)
        return precision.convert(model)

    def undo(self, model: nn.Module) -> nn.Module:
        return model if self._precision is None else self._precision.restore(model)


def give_masters(model: nn.Module) -> None:
    """Convert trained half-precision parameters to float32 in place; frozen ones keep their dtype.

    The model still computes in half precision. In bfloat16, updates below 1/256 of a weight are lost to rounding.
    """
    counts_by_dtype: dict[torch.dtype, int] = {}
    for parameter in model.parameters():
        dtype = parameter.dtype
        if parameter.requires_grad and dtype in (torch.float16, torch.bfloat16):
            grad, parameter.grad = parameter.grad, None
            parameter.data = parameter.data.float()
            parameter.grad = None if grad is None else grad.float()
            counts_by_dtype[dtype] = counts_by_dtype.get(dtype, 0) + 1
    if counts_by_dtype:
        counts_text = " and ".join(
            f"{count} {str(dtype).removeprefix('torch.')}"
            for dtype, count in counts_by_dtype.items()
        )
        log.info(
            "%s: %s parameters are trained as float32 master weights (master_weights=keep keeps their dtype)",
            type(model).__name__,
            counts_text,
        )
