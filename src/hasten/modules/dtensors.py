"""Recognising DTensors and FSDP2 modules without loading `torch.distributed.tensor`, which takes most of a second.

A process in which those modules were never loaded holds no such object, so looking at what is loaded is enough.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, TypeGuard

from torch import Tensor, nn

from hasten.optional import need

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def is_dtensor(value: object) -> TypeGuard[DTensor]:
    """Whether `value` is a DTensor."""
    if type(value) is Tensor or type(value) is nn.Parameter:
        return False
    kind = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)
    return kind is not None and isinstance(value, kind)


def whole_of(value: DTensor) -> Tensor:
    """Return the whole tensor on every rank, gathered along one axis of the mesh after the other. Ranks: the mesh.

    `full_tensor()` gathers in the same steps where a dimension is sharded along several axes, and logs a warning on every rank.
    """
    replicate = placements().Replicate()
    for axis, placement in enumerate(value.placements):
        if placement != replicate:
            lying = [replicate if other == axis else known for other, known in enumerate(value.placements)]
            value = value.redistribute(placements=lying)
    return value.to_local()


def placements() -> Any:  # Any: a module of torch's, typed nowhere
    """The module that holds `DTensor`, `Shard`, `Replicate`, `Partial` and `distribute_tensor`, loaded on first use."""
    return need("torch.distributed.tensor")
