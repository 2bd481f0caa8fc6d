"""Operations on the gradients of many parameters at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

from hasten.modules.names import is_dtensor


def existing_gradients(parameters: Iterable[Tensor]) -> list[Tensor]:
    """Return the gradients that are not None."""
    return [p.grad for p in parameters if p.grad is not None]


def gradient_versions(parameters: Iterable[Tensor]) -> list[tuple[Tensor | None, int]]:
    """Return each gradient with its version counter, which any write increments."""
    return [
        (p.grad, 0 if p.grad is None else _local_gradient(p.grad)._version)
        for p in parameters
    ]


def _local_gradient(grad: Tensor) -> Tensor:
    return grad.to_local() if is_dtensor(grad) else grad


def group_local_gradients(grads: Iterable[Tensor]) -> list[list[Tensor]]:
    """Return this rank's shards of the gradients, as dense tensors grouped by device and dtype for foreach kernels."""
    parts_by_place: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for grad in grads:
        local_part = _local_gradient(grad)
        local_part = local_part._values() if local_part.is_sparse else local_part
        parts_by_place.setdefault((local_part.device, local_part.dtype), []).append(
            local_part
        )
    return list(parts_by_place.values())


@torch.no_grad()
def multiply_gradients(
    param_groups: Iterable[dict[str, Any]], factor: float | Tensor
) -> None:
    """Multiply all gradients by `factor`, in place."""
    for gradients_of_kind in group_local_gradients(
        grad
        for param_group in param_groups
        for grad in existing_gradients(param_group["params"])
    ):
        torch._foreach_mul_(
            gradients_of_kind,
            factor.to(gradients_of_kind[0].device)
            if isinstance(factor, Tensor)
            else factor,
        )


_DEPTH: Final = 4
"""Distance from the loss up to which a division by a count on the device is looked for."""
_Gradients = tuple[Tensor | None, ...]
_LEAF: Final = "AccumulateGrad"


def zero_if_weightless(
    loss: Tensor, weight: float | Tensor, joined: bool = False
) -> AbstractContextManager[None]:
    """Return a context manager for the backward of `loss` in which gradients are zero if `weight` is zero.

    Multiplying by zero is not enough: zero times the nan of a mean over nothing is nan. A weight in host memory is
    read, and everything behind a loss of weight zero is set to zero. A weight on a device is not read, which would
    synchronize; the first operations behind the loss, where means are taken, are guarded on the device. Only those are
    guarded, too, if the graph is `joined` with those of other ranks, whose gradients flow through the rest of it.
    """
    if loss.grad_fn is None or (_is_on_host(weight) and float(weight) != 0):
        return nullcontext()
    return _hooked_graph(loss.grad_fn, *_gradient_change(weight, joined))


def leave_if_weightless(loss: Tensor, weight: float | Tensor) -> None:
    """Make a later backward of `loss` produce zeros if `weight` is zero."""
    if loss.grad_fn is not None and not (_is_on_host(weight) and float(weight) != 0):
        # the hooks are freed with the graph
        _hook_graph(loss.grad_fn, *_gradient_change(weight, joined=False))


def _is_on_host(weight: float | Tensor) -> bool:
    return not isinstance(weight, Tensor) or weight.device.type == "cpu"


def _gradient_change(
    weight: float | Tensor, joined: bool
) -> tuple[int | None, Callable[[_Gradients], _Gradients]]:
    """Return the depth down to which gradients are changed, and the change."""
    if not isinstance(weight, Tensor) or _is_on_host(weight):
        return _DEPTH if joined else None, _zero_gradients
    counts = weight.detach().reshape(()) != 0

    def guarded(grads: _Gradients) -> _Gradients:
        return tuple(
            g if g is None else torch.where(counts.to(g.device), g, torch.zeros_like(g))
            for g in grads
        )

    return _DEPTH, guarded


def _zero_gradients(grads: _Gradients) -> _Gradients:
    return tuple(None if grad is None else torch.zeros_like(grad) for grad in grads)


@contextmanager
def _hooked_graph(
    root: Node, depth: int | None, change: Callable[[_Gradients], _Gradients]
) -> Iterator[None]:
    """Context manager that changes the gradients returned by every node from the root on, down to some depth.

    The gradients that parameters receive are not changed: their hooks run in between, and a hook that averages over
    ranks includes gradients of ranks with a weighted loss.
    """
    handles = _hook_graph(root, depth, change)
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _hook_graph(
    root: Node, depth: int | None, change: Callable[[_Gradients], _Gradients]
) -> list[Any]:
    handles: list[Any] = []  # Any: torch names no type for them
    level_nodes = [root]
    hooked_nodes = {root}
    while level_nodes and depth != 0:
        handles += [
            node.register_hook(lambda handed, _: change(handed)) for node in level_nodes
        ]
        next_nodes = dict.fromkeys(
            next_node
            for node in level_nodes
            for next_node, _ in node.next_functions
            if next_node is not None
        )
        level_nodes = [
            node
            for node in next_nodes
            if node not in hooked_nodes and not node.name().endswith(_LEAF)
        ]
        hooked_nodes.update(level_nodes)
        depth = None if depth is None else depth - 1
    return handles


def drop_gradients(model: nn.Module) -> None:
    """Set the gradients of all parameters to None."""
    for parameter in model.parameters():
        parameter.grad = None
