"""Gradient clipping by global norm or by value, also for parameters on several meshes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hasten.comm.base import Comm
from hasten.errors import StepError
from hasten.modules.names import is_dtensor, placements
from hasten.optim.gradients import alike, gradients

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.placement_types import Placement


def as_list(parameters: Tensor | Iterable[Tensor]) -> list[Tensor]:
    """Return the parameters as a list, given one or several."""
    return [parameters] if isinstance(parameters, Tensor) else list(parameters)


def clip_norm(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    *,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
    across: Comm | None = None,
    counts: Callable[[Tensor], bool] | None = None,
) -> Tensor:
    """Scale the gradients so that their norm is at most `max_norm`; return the previous norm, over all ranks.

    Torch's own function clips gradients that this rank holds whole. `across` are the ranks that hold other parameters of
    the same model (pipeline stages); `counts` is False for a parameter that another of these ranks also holds and counts.
    Ranks: every rank, when a parameter is sharded or `across` is given.
    Raises: StepError when `error_if_nonfinite` and the norm is not finite.
    """
    chosen = as_list(parameters)
    special = error_if_nonfinite or (foreach, across, counts) != (None, None, None)
    if not special and not any(is_dtensor(parameter.grad) for parameter in chosen):
        plain: Tensor = torch.nn.utils.clip_grad_norm_(
            chosen, max_norm, norm_type=norm_type
        )
        return plain
    with torch.no_grad():
        return _clip_over_ranks(
            chosen, max_norm, norm_type, error_if_nonfinite, foreach, across, counts
        )


def _clip_over_ranks(
    clipped_parameters: list[Tensor],
    max_norm: float,
    norm_type: float,
    error_if_nonfinite: bool,
    foreach: bool | None,
    across: Comm | None,
    counts: Callable[[Tensor], bool] | None,
) -> Tensor:
    """Clip gradients that are sharded, or have a norm that torch's function does not know."""
    grads = gradients(clipped_parameters)
    counted = (
        grads
        if counts is None
        else gradients(
            [parameter for parameter in clipped_parameters if counts(parameter)]
        )
    )
    total = global_norm(counted, norm_type, foreach=foreach, across=across)
    if error_if_nonfinite and not bool(torch.isfinite(total)):
        raise StepError(
            f"the gradient norm is {float(total)}; clipping by it would make every gradient "
            "nan. Find the loss that is not finite, or pass error_if_nonfinite=False."
        )
    scale_down(grads, max_norm, total, foreach)
    return total


def global_norm(
    grads: Sequence[Tensor],
    norm_type: float = 2.0,
    *,
    foreach: bool | None = None,
    across: Comm | None = None,
) -> Tensor:
    """Return the norm of all gradients as one vector, as a plain tensor that is equal on every rank."""
    by_place: dict[object, list[Tensor]] = {}
    for grad in grads:
        by_place.setdefault(_place(grad), []).append(grad)
    norms = [_norm(same, norm_type, foreach) for same in by_place.values()]
    device = (
        norms[0].device
        if norms
        else (across.device if across is not None else torch.device("cpu"))
    )
    total = (
        norms[0]
        if len(norms) == 1
        else combine([norm.to(device) for norm in norms], norm_type, device)
    )
    if across is not None and across.size > 1:
        total = combine(list(across.all_gather(total)), norm_type, device)
    return total


def combine(norms: Sequence[Tensor], norm_type: float, device: torch.device) -> Tensor:
    """Return the norm of concatenated vectors, from their norms."""
    if not norms:
        return torch.zeros((), device=device)
    total: Tensor = torch.linalg.vector_norm(torch.stack(list(norms)), norm_type)
    return total


def _place(grad: Tensor) -> object:
    """Return the key that groups gradients for one norm: the mesh and the kind of placements, or the device."""
    if not is_dtensor(grad):
        return grad.device
    return grad.device_mesh, tuple(
        "split" if _is_split(p) else str(p) for p in grad.placements
    )


def _norm(grads: list[Tensor], norm_type: float, foreach: bool | None) -> Tensor:
    """Return the norm of gradients with equal placements, over all ranks they are sharded over."""
    first = grads[0]
    if not is_dtensor(first):
        plain: Tensor = torch.nn.utils.get_total_norm(grads, norm_type, foreach=foreach)
        return plain
    if any(placement.is_partial() for placement in first.placements):
        grads = [
            grad.redistribute(placements=_summed(grad))
            for grad in grads
            if is_dtensor(grad)
        ]
    parts = [grad.to_local() for grad in grads if is_dtensor(grad)]
    # a rank may hold no row of a small parameter
    mine = [part for part in parts if part.numel()]
    norm = (
        torch.nn.utils.get_total_norm(mine, norm_type, foreach=foreach)
        if mine
        else parts[0].new_zeros(())
    )
    kind = "max" if math.isinf(norm_type) else "sum"
    total = norm if kind == "max" else norm**norm_type
    tensor = placements()
    for dim, placement in enumerate(first.placements):
        if _is_split(placement):
            lying = [
                tensor.Partial(kind) if other == dim else tensor.Replicate()
                for other in range(len(first.placements))
            ]
            total = tensor.DTensor.from_local(
                total, first.device_mesh, lying, run_check=False
            ).full_tensor()
    return total if kind == "max" else total ** (1.0 / norm_type)


def _is_split(placement: Placement) -> bool:
    """Return True if ranks hold different shards; a dimension split twice is not torch's plain Shard."""
    return not placement.is_replicate() and not placement.is_partial()


def _summed(grad: DTensor) -> list[Placement]:
    tensor = placements()
    return [
        tensor.Replicate() if placement.is_partial() else placement
        for placement in grad.placements
    ]


def scale_down(
    grads: list[Tensor], max_norm: float, total: Tensor, foreach: bool | None
) -> None:
    """Multiply the gradients by max_norm / total if total is larger, without a device synchronization."""
    if not grads or math.isinf(max_norm):
        return
    factor = torch.clamp(max_norm / (total + 1e-6), max=1.0)
    for same in alike(grads):
        by = factor.to(same[0].device)
        if foreach is False:
            for grad in same:
                grad.mul_(by)
        else:
            torch._foreach_mul_(same, by)


@torch.no_grad()
def clip_value(
    parameters: Tensor | Iterable[Tensor], limit: float, foreach: bool | None = None
) -> None:
    """Clamp every element of the gradients to [-limit, limit]."""
    for same in alike(gradients(as_list(parameters))):
        if foreach is False:
            for grad in same:
                grad.clamp_(-limit, limit)
        else:
            torch._foreach_clamp_min_(same, -limit)
            torch._foreach_clamp_max_(same, limit)
