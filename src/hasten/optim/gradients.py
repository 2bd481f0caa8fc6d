"""Arithmetic on the gradients of many parameters at once."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from hasten.modules.dtensors import is_dtensor


def gradients(parameters: Iterable[Tensor]) -> list[Tensor]:
    """The gradients that are there."""
    return [p.grad for p in parameters if p.grad is not None]


def versions(parameters: Iterable[Tensor]) -> list[tuple[Tensor | None, int]]:
    """Each gradient with its version, which any write to it raises."""
    return [(p.grad, 0 if p.grad is None else _part(p.grad)._version) for p in parameters]


def _part(grad: Tensor) -> Tensor:
    return grad.to_local() if is_dtensor(grad) else grad


def alike(grads: Iterable[Tensor]) -> list[list[Tensor]]:
    """This rank's parts of the gradients, as dense tensors grouped by device and dtype: what a foreach kernel takes."""
    places: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for grad in grads:
        part = _part(grad)
        part = part._values() if part.is_sparse else part
        places.setdefault((part.device, part.dtype), []).append(part)
    return list(places.values())


@torch.no_grad()
def multiply(param_groups: Iterable[dict[str, Any]], factor: float | Tensor) -> None:
    """Multiply all gradients by `factor`, in place."""
    for same in alike(grad for group in param_groups for grad in gradients(group["params"])):
        torch._foreach_mul_(same, factor.to(same[0].device) if isinstance(factor, Tensor) else factor)
