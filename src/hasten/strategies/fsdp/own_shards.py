"""Elementwise optimizers that update this rank's shards as plain tensors, without the overhead of DTensor."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from torch import Tensor
from torch.optim import (
    ASGD,
    LBFGS,
    SGD,
    Adadelta,
    Adagrad,
    Adam,
    Adamax,
    AdamW,
    NAdam,
    Optimizer,
    RAdam,
    RMSprop,
    Rprop,
)

from hasten.errors import PrepareError
from hasten.modules.names import is_dtensor, placements
from hasten.strategies.fsdp.whole_updates import needs_wholes, update_wholes

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

ELEMENTWISE: Final = (SGD, Adam, AdamW, RMSprop, Adagrad, Adadelta, Adamax, NAdam, RAdam, ASGD, Rprop)
"""Optimizers in which elements are updated independently, so that updating a shard equals sharding the update."""
_IN_SHARDS: Final = "AdamW, SGD or another elementwise optimizer"
Collect = Callable[..., Any]  # Any: torch's method, which differs by optimizer


def refuse_unshardable(optimizer: Optimizer) -> None:
    """Raise for an optimizer that cannot update sharded parameters, before training starts.

    Raises: PrepareError with the optimizer, the parameter it cannot handle, and alternatives.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    shards = [parameter for parameter in parameters if is_dtensor(parameter)]
    if not shards:
        return
    name = f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"
    if isinstance(optimizer, LBFGS):
        uneven = next((p for p in parameters if not is_dtensor(p) or not _evenly_cut(p)), None)
        if uneven is not None:
            raise PrepareError(
                f"{name} concatenates all parameters, which torch does not support if a parameter of shape {tuple(uneven.shape)} is not "
                f"sharded evenly over {shards[0].device_mesh.size()} ranks. Use {_IN_SHARDS}, "
                "or strategy='ddp'."
            )


def _evenly_cut(parameter: DTensor) -> bool:
    """Return whether all ranks have shards of equal size."""
    return all(
        parameter.shape[placement.dim] % parameter.device_mesh.size(axis) == 0
        for axis, placement in enumerate(parameter.placements)
        if isinstance(placement, placements().Shard)
    )


def update_own_shards(optimizer: Optimizer) -> None:
    """Make the optimizer's kernels use shards as plain tensors; safe to call repeatedly.

    A DTensor checks and wraps in Python at every operation, which on small shards takes longer than the operation; and
    torch's foreach kernels take shards or whole tensors, not both (a scalar stays whole). Parameters, gradients and state
    remain DTensors for all other code. Optimizers of other classes run without foreach if they have both kinds;
    optimizers without a DTensor among their parameters are not changed.
    """
    kinds = {is_dtensor(p) for group in optimizer.param_groups for p in group["params"]}
    if True not in kinds:
        return
    if needs_wholes(optimizer):
        update_wholes(optimizer)
        return
    if type(optimizer) not in ELEMENTWISE and len(kinds) > 1:
        for group in optimizer.param_groups:
            if group.get("foreach", True) is None:
                group["foreach"] = False
    collect: Collect | None = getattr(optimizer, "_init_group", None)
    if type(optimizer) in ELEMENTWISE and collect is not None and not isinstance(collect, partial):
        makes_state = type(optimizer) is SGD
        optimizer._init_group = partial(_collect_shards, collect, makes_state)  # type: ignore[attr-defined]  # a private method of torch
        if makes_state:
            optimizer.register_step_post_hook(_file_momenta)


def _file_momenta(optimizer: Optimizer, args: object, kwargs: object) -> None:
    """Move SGD's momentum from the local tensors to their parameters, as DTensors."""
    owners = {id(p._local_tensor): p for group in optimizer.param_groups for p in group["params"] if is_dtensor(p)}
    for part in [part for part in optimizer.state if id(part) in owners]:
        made = optimizer.state.pop(part).get("momentum_buffer")
        owner = owners[id(part)]
        if made is not None and optimizer.state[owner].get("momentum_buffer") is None:
            optimizer.state[owner]["momentum_buffer"] = placements().DTensor.from_local(
                made,
                owner.device_mesh,
                owner.placements,
                run_check=False,
                shape=owner.shape,
                stride=owner.stride(),
            )


def _collect_shards(
    collect: Collect, makes_state: bool, group: dict[str, Any], *lists: list[Any]
) -> Any:  # Any: torch's method
    """Collect the tensors of one update (parameters, gradients, state), with local tensors in place of DTensors."""
    gathered = collect(group, *lists)
    if group.get("differentiable") or not _all_shards_alike(lists, makes_state):
        return gathered
    for values in lists:
        values[:] = [value._local_tensor if is_dtensor(value) else value for value in values]
    return gathered


def _all_shards_alike(lists: tuple[list[Any], ...], makes_state: bool) -> bool:
    """Return whether parameter, gradient and state of each parameter are sharded alike, or are all whole.

    State that the update itself creates (None before) would not be sharded, unless it is converted afterwards.
    """
    filled = [values for values in lists if values]
    if len({len(values) for values in filled}) != 1:
        return False
    shards = False
    for values in zip(*filled, strict=True):
        first = values[0]
        shards = shards or is_dtensor(first)
        for value in values[1:]:
            if value is None and not makes_state:
                return False
            if isinstance(value, Tensor) and value.ndim and not _cut_alike(value, first):
                return False
    return shards


def _cut_alike(value: Tensor, other: Tensor) -> bool:
    if not is_dtensor(value) or not is_dtensor(other):
        return not is_dtensor(value) and not is_dtensor(other)
    return value.placements == other.placements and value.shape == other.shape
