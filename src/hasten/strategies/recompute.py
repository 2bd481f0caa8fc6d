"""Transform for activation checkpointing: activations of chosen blocks are recomputed in backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from hasten.comm.agreement import agree
from hasten.errors import ConfigError
from hasten.modules import forwarding
from hasten.precision.base import Precision
from hasten.runtime.context import ProcessContext
from hasten.strategies.base import PrepareRequest, Stage, is_trainable

_CACHES: Final = ("past_key_values", "past_key_value")


class RecomputedForward(forwarding.Forward):
    """Forward whose activations are discarded and recomputed in backward."""

    tag = "recompute"

    def __init__(self, offload: bool = False) -> None:
        self.offload = offload

    # Any: the user's arguments and outputs
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.inner(*args, **kwargs)
        kwargs = _without_empty_caches(kwargs)
        if not self.offload:
            return checkpoint(self.inner, *args, use_reentrant=False, **kwargs)
        with torch.autograd.graph.save_on_cpu(
            pin_memory=torch.accelerator.is_available()
        ):
            return checkpoint(self.inner, *args, use_reentrant=False, **kwargs)


# Any: the user's arguments
def _without_empty_caches(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments without key-value caches of transformers, which the recomputation would extend again.

    A cache that already has keys, such as a trained prefix, is left.
    """
    changed_arguments = dict(arguments)
    for name in _CACHES:
        get_length = getattr(changed_arguments.get(name), "get_seq_length", None)
        if callable(get_length) and get_length() == 0:
            changed_arguments[name] = None
    return changed_arguments


class Recompute:
    """Transform that recomputes the activations of the blocks that `find` returns; of nested blocks, the outermost.

    `setting` is the name of the setting, for error messages.
    """

    stage = Stage.RECOMPUTE

    def __init__(
        self,
        find: Callable[[nn.Module], list[nn.Module]],
        setting: str,
        offload: bool = False,
    ) -> None:
        self._find = find
        self._setting = setting
        self._offload = offload

    def apply(
        self,
        model: nn.Module,
        request: PrepareRequest,
        ctx: ProcessContext,
        precision: Precision,
    ) -> nn.Module:
        if not request.train:
            return model
        with agree(ctx.world, f"choosing what to recompute of {type(model).__name__}"):
            blocks = self._recomputed_blocks(model)
        for block in blocks:
            if forwarding.find(block, RecomputedForward.tag) is None:
                forwarding.replace(block, RecomputedForward(self._offload))
        return model

    def _recomputed_blocks(self, model: nn.Module) -> list[nn.Module]:
        blocks = self._find(model)
        if not blocks and is_trainable(model):
            raise ConfigError(
                f"{self._setting} is set, but {type(model).__name__} has no repeated block to recompute. Name the classes of its blocks "
                "in recompute."
            )
        nested_ids = set()
        for block in blocks:
            for module in block.modules():
                if module is not block:
                    nested_ids.add(id(module))
        return [block for block in blocks if id(block) not in nested_ids]

    def undo(self, model: nn.Module) -> nn.Module:
        for module in model.modules():
            forwarding.restore(module, RecomputedForward.tag)
        return model
