"""Gradients that FSDP2 holds between two reductions, in private attributes outside the parameters' .grad."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule


def drop_held_gradients(model: nn.Module) -> None:
    """Drop the gradients of an interrupted accumulation window that the next reduction would add."""
    for group in _groups(model):
        if hasattr(group, "_partial_reduce_output"):
            group._partial_reduce_output = None
        for parameter in group.fsdp_params:
            if hasattr(parameter, "unsharded_accumulated_grad"):
                parameter.unsharded_accumulated_grad = None
            if (gathered := getattr(parameter, "_unsharded_param", None)) is not None:
                gathered.grad = None


def _groups(model: nn.Module) -> Iterator[Any]:
    """Return FSDP's private records of its parameters, one per shard group."""
    return (group for group in _all_groups(model) if group.fsdp_params)


def _all_groups(model: nn.Module) -> Iterator[Any]:
    for module in model.modules():
        if isinstance(module, FSDPModule):
            state: Any = module._get_fsdp_state()
            # torch<2.12 has one group per module, later versions a list of groups.
            groups = getattr(state, "_fsdp_param_groups", None) or [getattr(state, "_fsdp_param_group", None)]
            yield from (group for group in groups if group is not None)
