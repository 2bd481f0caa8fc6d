"""Dispatch mode that skips collectives which this process has already started, for repeating a pass.

A rank that failed in the middle of a pass has started some of its collectives; the other ranks wait in the next one. When it repeats the
pass from the start, the collectives it started return zeros at once, and it takes part again from the next one on.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import Tensor
from torch._C._distributed_c10d import FakeWork
from torch.distributed import ProcessGroup
from torch.utils._python_dispatch import TorchDispatchMode

_NAMESPACE: Final = "c10d"
_BARRIER: Final = "c10d::barrier"


class SkipBegun(TorchDispatchMode):
    """Dispatch mode that fills the first collectives of each group with zeros; `begun` gives their number by group and device."""

    def __init__(self, begun: Mapping[str, int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        self._left = {name: count for name, count in begun.items() if count > 0}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # Any: torch's own
        if func.namespace != _NAMESPACE or not self._takes(args):
            return func(*args, **(kwargs or {}))
        filled = _zeroed(args[0])
        work = FakeWork().boxed()
        return work if func.name() == _BARRIER else (filled, work)

    def _takes(self, args: tuple[Any, ...]) -> bool:
        """Return whether this collective is skipped, and count it."""
        group = group_of(args)
        tensor = next(iter(tensors_in(args)), None)
        if group is None or tensor is None:
            return False
        name = f"{group.group_name}/{tensor.device.type}"
        left = self._left.get(name, 0)
        if left:
            self._left[name] = left - 1
        return left > 0


def group_of(args: tuple[Any, ...]) -> ProcessGroup | None:
    """Return the group of a collective, from its arguments in torch's dispatcher."""
    return next((found for arg in args if (found := _unboxed(arg)) is not None), None)


def _unboxed(arg: object) -> ProcessGroup | None:
    if not isinstance(arg, torch.ScriptObject):
        return None
    try:
        return ProcessGroup.unbox(arg)
    except (RuntimeError, TypeError):  # another kind of object, such as a reduction operator
        return None


def tensors_in(values: Any) -> list[Tensor]:
    """Return the tensors of nested lists, in order."""
    if isinstance(values, Tensor):
        return [values]
    if isinstance(values, (list, tuple)):
        return [tensor for value in values for tensor in tensors_in(value)]
    return []


def _zeroed(outputs: Any) -> Any:
    """Fill the output tensors of a collective with zeros and return them."""
    with torch.no_grad():
        for tensor in tensors_in(outputs):
            tensor.zero_()
    return outputs
