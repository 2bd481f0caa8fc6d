"""Gradient clipping by global norm or by value, also for parameters on several meshes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hasten.comm.base import Comm
from hasten.modules.names import is_dtensor, placements
from hasten.optim.gradients import existing_gradients, group_local_gradients

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
    across: Comm | None = None,
    counts: Callable[[Tensor], bool] | None = None,
) -> Tensor:
    """Scale the gradients so that their norm is at most `max_norm`; return the previous norm, over all ranks.

    Torch's own function clips gradients that this rank holds whole. `across` are the ranks that hold other parameters of
    the same model (pipeline stages); `counts` is False for a parameter that another of these ranks also holds and counts.
    Ranks: every rank, when a parameter is sharded or `across` is given.
    """
    clipped_parameters = as_list(parameters)
    if across is None and not any(is_dtensor(p.grad) for p in clipped_parameters):
        plain: Tensor = torch.nn.utils.clip_grad_norm_(
            clipped_parameters, max_norm, norm_type=norm_type
        )
        return plain
    counted_parameters = clipped_parameters
    if counts is not None:
        counted_parameters = [p for p in clipped_parameters if counts(p)]
    with torch.no_grad():
        total = global_norm(existing_gradients(counted_parameters), norm_type, across)
        scale_down(existing_gradients(clipped_parameters), max_norm, total)
    return total


def global_norm(
    grads: Sequence[Tensor], norm_type: float = 2.0, across: Comm | None = None
) -> Tensor:
    """Return the norm of all gradients as one vector, as a plain tensor that is equal on every rank."""
    grads_by_placement: dict[object, list[Tensor]] = {}
    for grad in grads:
        grads_by_placement.setdefault(_placement_key(grad), []).append(grad)
    norms = [
        _norm_over_ranks(grads_of_kind, norm_type)
        for grads_of_kind in grads_by_placement.values()
    ]
    device = torch.device("cpu") if across is None else across.device
    if norms:
        device = norms[0].device
    total = combine_norms([norm.to(device) for norm in norms], norm_type, device)
    if across is not None and across.size > 1:
        total = combine_norms(list(across.all_gather(total)), norm_type, device)
    return total


def combine_norms(
    norms: Sequence[Tensor], norm_type: float, device: torch.device
) -> Tensor:
    """Return the norm of concatenated vectors, from their norms."""
    if not norms:
        return torch.zeros((), device=device)
    if len(norms) == 1:
        return norms[0]
    total: Tensor = torch.linalg.vector_norm(torch.stack(list(norms)), norm_type)
    return total


def _placement_key(grad: Tensor) -> object:
    """Return the key that groups gradients for one norm: the mesh and the kind of placements, or the device."""
    if not is_dtensor(grad):
        return grad.device
    return grad.device_mesh, tuple(
        "split" if _is_split(p) else str(p) for p in grad.placements
    )


def _norm_over_ranks(grads: list[Tensor], norm_type: float) -> Tensor:
    """Return the norm of gradients with equal placements, over all ranks they are sharded over."""
    first = grads[0]
    if not is_dtensor(first):
        plain: Tensor = torch.nn.utils.get_total_norm(grads, norm_type)
        return plain
    if any(placement.is_partial() for placement in first.placements):
        grads = [
            grad.redistribute(placements=_sum_placements(grad))
            for grad in grads
            if is_dtensor(grad)
        ]
    local_shards = [grad.to_local() for grad in grads if is_dtensor(grad)]
    # a rank may hold no row of a small parameter
    nonempty_shards = [
        local_shard for local_shard in local_shards if local_shard.numel()
    ]
    if nonempty_shards:
        norm = torch.nn.utils.get_total_norm(nonempty_shards, norm_type)
    else:
        norm = local_shards[0].new_zeros(())
    reduction = "max" if math.isinf(norm_type) else "sum"
    total = norm if reduction == "max" else norm**norm_type
    dtensor_types = placements()
    for shard_axis, placement in enumerate(first.placements):
        if _is_split(placement):
            partial_placements = [
                dtensor_types.Partial(reduction)
                if axis == shard_axis
                else dtensor_types.Replicate()
                for axis in range(len(first.placements))
            ]
            total = dtensor_types.DTensor.from_local(
                total, first.device_mesh, partial_placements, run_check=False
            ).full_tensor()
    return total if reduction == "max" else total ** (1.0 / norm_type)


def _is_split(placement: Placement) -> bool:
    """Return True if ranks hold different shards; a dimension split twice is not torch's plain Shard."""
    return not placement.is_replicate() and not placement.is_partial()


def _sum_placements(grad: DTensor) -> list[Placement]:
    dtensor_types = placements()
    return [
        dtensor_types.Replicate() if placement.is_partial() else placement
        for placement in grad.placements
    ]


def scale_down(grads: list[Tensor], max_norm: float, total: Tensor) -> None:
    """Multiply the gradients by max_norm / total if total is larger, without a device synchronization."""
    if not grads or math.isinf(max_norm):
        return
    factor = torch.clamp(max_norm / (total + 1e-6), max=1.0)
    for grads_of_kind in group_local_gradients(grads):
        torch._foreach_mul_(grads_of_kind, factor.to(grads_of_kind[0].device))


@torch.no_grad()
def clip_value(parameters: Tensor | Iterable[Tensor], limit: float) -> None:
    """Clamp every element of the gradients to [-limit, limit]."""
    for grads_of_kind in group_local_gradients(existing_gradients(as_list(parameters))):
        torch._foreach_clamp_min_(grads_of_kind, -limit)
        torch._foreach_clamp_max_(grads_of_kind, limit)
