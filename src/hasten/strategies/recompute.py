"""The transform that recomputes activations of chosen blocks in backward instead of keeping them."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from hasten.modules import forwarding
from hasten.precision.base import Precision
from hasten.runtime.context import ProcessContext
from hasten.strategies.base import Stage, Wish
from hasten.strategies.blocks import blocks_by_class, repeated_blocks


class RecomputedForward(forwarding.Forward):
    """A forward whose activations are dropped and computed again in backward."""

    tag = "recompute"

    def __init__(self, offload: bool = False) -> None:
        self.offload = offload

    def __call__(self, *args: Any, **kwargs: Any) -> Any:  # Any: the user's own arguments and outputs
        if not torch.is_grad_enabled():
            return self.inner(*args, **kwargs)
        if not self.offload:
            return checkpoint(self.inner, *args, use_reentrant=False, **kwargs)
        with torch.autograd.graph.save_on_cpu(pin_memory=torch.accelerator.is_available()):
            return checkpoint(self.inner, *args, use_reentrant=False, **kwargs)


class Recompute:
    """Recomputes the named classes of blocks, or the repeated block when no class is named."""

    stage = Stage.RECOMPUTE

    def __init__(self, classes: tuple[str, ...] = (), offload: bool = False) -> None:
        self._classes = classes
        self._offload = offload

    def apply(self, model: nn.Module, wish: Wish, ctx: ProcessContext, precision: Precision) -> nn.Module:
        if not wish.train:
            return model
        named = blocks_by_class(model, self._classes, "recompute") if self._classes else repeated_blocks(model)
        for _, block in named:
            if forwarding.find(block, RecomputedForward.tag) is None:
                forwarding.replace(block, RecomputedForward(self._offload))
        return model

    def undo(self, model: nn.Module) -> nn.Module:
        for part in model.modules():
            forwarding.restore(part, RecomputedForward.tag)
        return model
