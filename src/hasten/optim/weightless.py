"""A loss that weighs nothing leaves exact zeros in the gradients, also when it is a mean over nothing (0/0)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Final

import torch
from torch import Tensor
from torch.autograd.graph import Node

_DEPTH: Final = 4
"""How far from the loss a division by a count on the device is looked for."""
_Gradients = tuple[Tensor | None, ...]
_LEAF: Final = "AccumulateGrad"


def zero_if_weightless(loss: Tensor, weight: float | Tensor, joined: bool = False) -> AbstractContextManager[None]:
    """A block for the backward of `loss`, in which gradients are zeros where `weight` is zero.

    Multiplying by zero is not enough: zero times the nan of a mean over nothing is nan. A weight in host memory is
    looked at, and everything behind a loss of weight zero is set to zero. A weight on a device is not read, which would
    wait for it; the first operations behind the loss, where means are taken, are guarded on the device. Only they are
    guarded, too, where the graph is `joined` with those of other ranks, whose gradients pass through the rest of it.
    """
    if loss.grad_fn is None or (_readable(weight) and float(weight) != 0):
        return nullcontext()
    return _hooked(loss.grad_fn, *_change(weight, joined))


def leave_if_weightless(loss: Tensor, weight: float | Tensor) -> None:
    """Make a backward of `loss` that comes later leave zeros where `weight` is zero."""
    if loss.grad_fn is not None and not (_readable(weight) and float(weight) != 0):
        _hook(loss.grad_fn, *_change(weight, joined=False))  # the hooks go with the graph


def _readable(weight: float | Tensor) -> bool:
    return not isinstance(weight, Tensor) or weight.device.type == "cpu"


def _change(weight: float | Tensor, joined: bool) -> tuple[int | None, Callable[[_Gradients], _Gradients]]:
    """How deep gradients are changed, and how."""
    if not isinstance(weight, Tensor) or _readable(weight):
        return _DEPTH if joined else None, _zeros
    counts = weight.detach().reshape(()) != 0

    def guarded(grads: _Gradients) -> _Gradients:
        return tuple(g if g is None else torch.where(counts.to(g.device), g, torch.zeros_like(g)) for g in grads)

    return _DEPTH, guarded


def _zeros(grads: _Gradients) -> _Gradients:
    return tuple(None if grad is None else torch.zeros_like(grad) for grad in grads)


@contextmanager
def _hooked(root: Node, depth: int | None, change: Callable[[_Gradients], _Gradients]) -> Iterator[None]:
    """Change what every node from the root on hands back, down to some depth, as long as the block runs.

    Not what parameters receive: their own hooks come in between, and one that averages over ranks brings gradients of
    ranks whose loss does weigh something.
    """
    handles = _hook(root, depth, change)
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _hook(root: Node, depth: int | None, change: Callable[[_Gradients], _Gradients]) -> list[Any]:
    handles: list[Any] = []  # Any: torch names no type for them
    level, seen = [root], {root}
    while level and depth != 0:
        handles += [node.register_hook(lambda handed, _: change(handed)) for node in level]
        behind = dict.fromkeys(after for node in level for after, _ in node.next_functions if after is not None)
        level = [node for node in behind if node not in seen and not node.name().endswith(_LEAF)]
        seen.update(level)
        depth = None if depth is None else depth - 1
    return handles
