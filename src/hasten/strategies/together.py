"""Optimizers that update all shards in a few kernels, as torch does by itself for parameters that are not sharded."""

from __future__ import annotations

from typing import Final

from torch.distributed.tensor import DTensor
from torch.optim import SGD, Adam, AdamW, Optimizer

_KNOWN: Final = (Adam, AdamW, SGD)
"""Optimizers whose kernels for many tensors at once torch offers for sharded ones."""


def update_together(optimizer: Optimizer) -> None:
    """Choose the kernels for many tensors where the user has not chosen and torch falls back to a loop over shards.

    Acts again after `load_state_dict`, which brings back the choice of the run that saved.
    """
    if type(optimizer) in _KNOWN and _choose(optimizer):
        optimizer.register_load_state_dict_post_hook(_after_load)


def _after_load(optimizer: Optimizer) -> None:
    _choose(optimizer)


def _choose(optimizer: Optimizer) -> bool:
    changed = False
    for group in optimizer.param_groups:
        free = group.get("foreach") is None and not group.get("fused") and not group.get("differentiable")
        shards = [isinstance(p, DTensor) and p.device.type != "cpu" for p in group["params"]]
        if free and shards and all(shards):
            group["foreach"] = changed = True
    return changed
