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


def placements() -> Any:  # Any: a module of torch's, typed nowhere
    """The module that holds `DTensor`, `Shard`, `Replicate`, `Partial` and `distribute_tensor`, loaded on first use."""
    return need("torch.distributed.tensor")
