"""Optimizers over sharded parameters: elementwise ones update this rank's shards as plain tensors, because operations on DTensors are slow."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Final

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
from hasten.modules.names import is_dtensor, like_parameter

ELEMENTWISE: Final = (
    SGD,
    Adam,
    AdamW,
    RMSprop,
    Adagrad,
    Adadelta,
    Adamax,
    NAdam,
    RAdam,
    ASGD,
    Rprop,
)
"""Optimizers in which elements are updated independently, so that updating a shard equals sharding the update."""
Collect = Callable[..., Any]  # Any: torch's method, which differs by optimizer


def refuse_unshardable(optimizer: Optimizer) -> None:
    """Raise PrepareError, before training starts, for an optimizer whose update of an element depends on whole parameters."""
    if isinstance(optimizer, LBFGS) or type(optimizer).__name__ == "Adafactor":
        raise PrepareError(
            f"{type(optimizer).__module__}.{type(optimizer).__qualname__} computes with whole parameters, and under this strategy each rank holds "
            "shards of them. Use AdamW, SGD or another elementwise optimizer, or strategy='ddp'."
        )


def update_own_shards(optimizer: Optimizer) -> None:
    """Make the optimizer's kernels use shards as plain tensors; safe to call repeatedly.

    A DTensor checks and wraps in Python at every operation, which on small shards takes longer than the operation; and
    torch's foreach kernels take shards or whole tensors, not both (a scalar stays whole). Parameters, gradients and state
    remain DTensors for all other code. Optimizers of other classes run without foreach if they have both kinds;
    optimizers without a DTensor among their parameters are not changed.
    """
    kinds = set()
    for param_group in optimizer.param_groups:
        for parameter in param_group["params"]:
            kinds.add(is_dtensor(parameter))
    if True not in kinds:
        return
    if type(optimizer) not in ELEMENTWISE and len(kinds) > 1:
        for param_group in optimizer.param_groups:
            if param_group.get("foreach", True) is None:
                param_group["foreach"] = False
    collect: Collect | None = getattr(optimizer, "_init_group", None)
    if (
        type(optimizer) in ELEMENTWISE
        and collect is not None
        and not isinstance(collect, partial)
    ):
        makes_state = type(optimizer) is SGD
        optimizer._init_group = partial(_collect_shards, collect, makes_state)  # type: ignore[attr-defined]  # a private method of torch
        if makes_state:
            optimizer.register_step_post_hook(_file_momenta)


def _file_momenta(optimizer: Optimizer, args: object, kwargs: object) -> None:
    """Move SGD's momentum from the local tensors to their parameters, as DTensors."""
    owners = {}
    for param_group in optimizer.param_groups:
        for parameter in param_group["params"]:
            if is_dtensor(parameter):
                owners[id(parameter._local_tensor)] = parameter
    for local_tensor in [
        local_tensor for local_tensor in optimizer.state if id(local_tensor) in owners
    ]:
        momentum = optimizer.state.pop(local_tensor).get("momentum_buffer")
        owner = owners[id(local_tensor)]
        if (
            momentum is not None
            and optimizer.state[owner].get("momentum_buffer") is None
        ):
            optimizer.state[owner]["momentum_buffer"] = like_parameter(momentum, owner)


def _collect_shards(
    collect: Collect, makes_state: bool, group: dict[str, Any], *lists: list[Any]
) -> Any:  # Any: torch's method
    """Collect the tensors of one update (parameters, gradients, state), with local tensors in place of DTensors."""
    collected = collect(group, *lists)
    if group.get("differentiable") or not _all_sharded_equally(lists, makes_state):
        return collected
    for tensors in lists:
        tensors[:] = [
            value._local_tensor if is_dtensor(value) else value for value in tensors
        ]
    return collected


def _all_sharded_equally(lists: tuple[list[Any], ...], makes_state: bool) -> bool:
    """Return whether parameter, gradient and state of each parameter are sharded alike, or are all whole.

    State that the update itself creates (None before) would not be sharded, unless it is converted afterwards.
    """
    filled_lists = [values for values in lists if values]
    if len(set(map(len, filled_lists))) != 1:
        return False
    has_shards = False
    for values in zip(*filled_lists, strict=True):
        parameter = values[0]
        has_shards = has_shards or is_dtensor(parameter)
        for value in values[1:]:
            if value is None and not makes_state:
                return False
            if (
                isinstance(value, Tensor)
                and value.ndim
                and not _is_sharded_equally(value, parameter)
            ):
                return False
    return has_shards


def _is_sharded_equally(value: Tensor, parameter: Tensor) -> bool:
    if not is_dtensor(value) or not is_dtensor(parameter):
        return not is_dtensor(value) and not is_dtensor(parameter)
    return value.placements == parameter.placements and value.shape == parameter.shape
