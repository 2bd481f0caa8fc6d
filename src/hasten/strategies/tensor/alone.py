"""Distribution transform for a run in which all ranks are tensor-parallel, so that no gradients are averaged and nothing is gathered."""

from __future__ import annotations

from typing import Any

from torch import nn

from hasten.config.sections.parallel import FullyShardedDataParallelPlugin
from hasten.modules.names import is_dtensor
from hasten.precision.base import Precision
from hasten.runtime.context import ProcessContext
from hasten.strategies.base import PrepareRequest
from hasten.strategies.native import SingleProcess
from hasten.strategies.weight_sources import (
    allocate_meta,
    fill_by_function,
    keep_rest_on_device,
    named_tensors,
)
from hasten.strategies.whole import whole_on_main


class TensorParallelOnly(SingleProcess):
    """Distribution transform that does not change split layers: all ranks read the same samples, so their gradients agree.

    torch's fully_shard would do the same for a data-parallel size of one, but would build a DTensor of every parameter in
    every forward.
    """

    def __init__(self, fsdp_config: FullyShardedDataParallelPlugin) -> None:
        self._config = fsdp_config
        self._is_main = True

    def apply(
        self,
        model: nn.Module,
        request: PrepareRequest,
        ctx: ProcessContext,
        precision: Precision,
    ) -> nn.Module:
        self._is_main = ctx.is_main
        if not request.place or hasattr(model, "hf_device_map"):
            return model
        on_meta = any(tensor.is_meta for _, tensor in named_tensors(model))
        allocate_meta(model, ctx.device)
        keep_rest_on_device(model, ctx)
        if on_meta:
            fill_by_function(model, self._config)
        return model

    # Any: tensors and extra state
    def full_state_dict(self, model: nn.Module) -> dict[str, Any]:
        """Return whole tensors in host memory on the main process; an empty dict elsewhere. Ranks: every rank."""
        if not any(map(is_dtensor, model.parameters())):
            return super().full_state_dict(model)
        return whole_on_main(model, self._is_main)
