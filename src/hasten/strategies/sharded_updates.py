"""Optimizers over sharded parameters: elementwise ones update this rank's shards as plain tensors, others gather each parameter.

The shards are plain tensors in the update because operations on DTensors are slow. Adafactor's update of an element depends on the whole
parameter, so sharded parameters are gathered one by one.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor, nn
from torch.optim import (
    ASGD,
    LBFGS,
    SGD,
    Adadelta,
    Adafactor,
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

from hasten.checkpoint.base import dtensor_slice
from hasten.errors import PrepareError, StepError
from hasten.modules.names import is_dtensor, like_parameter, placements

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

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
_IN_SHARDS: Final = "AdamW, SGD or another elementwise optimizer"
_MARK: Final = "updates_wholes"
Collect = Callable[..., Any]  # Any: torch's method, which differs by optimizer


def refuse_unshardable(optimizer: Optimizer) -> None:
    """Raise for an optimizer that cannot update sharded parameters, before training starts.

    Raises: PrepareError with the optimizer, the parameter it cannot handle, and alternatives.
    """
    parameters = [
        parameter for group in optimizer.param_groups for parameter in group["params"]
    ]
    shards = [parameter for parameter in parameters if is_dtensor(parameter)]
    if not shards:
        return
    name = f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"
    if isinstance(optimizer, LBFGS):
        uneven_parameter = next(
            (p for p in parameters if not is_dtensor(p) or not _evenly_cut(p)), None
        )
        if uneven_parameter is not None:
            raise PrepareError(
                f"{name} concatenates all parameters, which torch does not support if a parameter of shape {tuple(uneven_parameter.shape)} is not "
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
    owners = {
        id(p._local_tensor): p
        for group in optimizer.param_groups
        for p in group["params"]
        if is_dtensor(p)
    }
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
    result = collect(group, *lists)
    if group.get("differentiable") or not _all_shards_alike(lists, makes_state):
        return result
    for values in lists:
        values[:] = [
            value._local_tensor if is_dtensor(value) else value for value in values
        ]
    return result


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
            if (
                isinstance(value, Tensor)
                and value.ndim
                and not _cut_alike(value, first)
            ):
                return False
    return shards


def _cut_alike(value: Tensor, other: Tensor) -> bool:
    if not is_dtensor(value) or not is_dtensor(other):
        return not is_dtensor(value) and not is_dtensor(other)
    return value.placements == other.placements and value.shape == other.shape


def needs_wholes(optimizer: Optimizer) -> bool:
    """Return whether the optimizer has statistics over rows, columns or whole parameters: Adafactor (torch, transformers)."""
    return isinstance(optimizer, Adafactor) or type(optimizer).__name__ == "Adafactor"


def update_wholes(optimizer: Optimizer) -> None:
    """Make every rank update whole parameters, gathered one at a time, and store its shards; safe to call repeatedly.

    An update sends each parameter and its gradient once. State with the parameter's shape is sharded like the parameter; row
    and column statistics are whole on every rank.
    """
    if _MARK not in vars(optimizer):
        gather = vars(optimizer)[_MARK] = _GatherShards()
        optimizer.register_step_pre_hook(gather)
        optimizer.register_step_post_hook(gather.put_back)


class _GatherShards:
    """Step hooks that update the parameters one by one, and leave none to the step itself."""

    def __init__(self) -> None:
        self._params: list[list[Tensor]] | None = None

    @torch.no_grad()
    # Any: step()'s
    def __call__(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        # the first argument is the optimizer
        if len(args) > 1 or kwargs.get("closure") is not None:
            raise StepError(
                f"{type(optimizer).__name__}.step(closure) is not supported for sharded parameters, which are gathered one by one after "
                "the backward. Call backward() and step() instead."
            )
        groups = optimizer.param_groups
        params = [list(group["params"]) for group in groups]
        try:
            for group, members in zip(groups, params, strict=True):
                for parameter in members:
                    if parameter.grad is not None:
                        optimizer.param_groups = [group]
                        _update_parameter(optimizer, group, parameter)
        finally:
            optimizer.param_groups = groups
            for group, members in zip(groups, params, strict=True):
                group["params"] = members
        self._params = params
        for group in groups:
            group["params"] = []

    def put_back(self, optimizer: Optimizer, args: object, kwargs: object) -> None:
        """Restore the parameters of the groups."""
        for group, members in zip(
            optimizer.param_groups, self._params or [], strict=True
        ):
            group["params"] = members
        self._params = None


def _update_parameter(
    optimizer: Optimizer, group: dict[str, Any], parameter: Tensor
) -> None:
    """Update one parameter. Ranks: every rank that holds a shard of it."""
    # without hooks, which run once per step
    step = inspect.unwrap(type(optimizer).step)
    if not is_dtensor(parameter):
        group["params"] = [parameter]
        step(optimizer)
        return
    assert parameter.grad is not None, "it has a gradient"
    whole_parameter = nn.Parameter(_gather_whole(parameter), requires_grad=False)
    whole_parameter.grad = _gather_whole(parameter.grad)
    state = optimizer.state.pop(parameter, {})
    if state:
        optimizer.state[whole_parameter] = {
            k: _gather_whole(v) if is_dtensor(v) else v for k, v in state.items()
        }
    group["params"] = [whole_parameter]
    step(optimizer)
    new_state = optimizer.state.pop(whole_parameter)
    optimizer.state[parameter] = {
        key: _shard_of_whole(value, parameter)
        if isinstance(value, Tensor) and value.shape == parameter.shape
        else value
        for key, value in new_state.items()
    }
    own_slice = dtensor_slice(parameter)
    own_slice.data.copy_(
        _narrow_to_shard(whole_parameter, own_slice.offset, own_slice.data)
    )


def _gather_whole(tensor: Tensor) -> Tensor:
    if not is_dtensor(tensor):
        return tensor
    mesh_device_type = tensor.device_mesh.device_type
    # shards in host memory, which the group cannot gather
    if tensor.device.type != mesh_device_type:
        local = placements().DTensor.from_local(
            tensor.to_local().to(mesh_device_type),
            tensor.device_mesh,
            tensor.placements,
            run_check=False,
            shape=tensor.shape,
            stride=tensor.stride(),
        )
        gathered: Tensor = local.full_tensor().detach()
        return gathered
    return tensor.full_tensor().detach()


def _narrow_to_shard(whole: Tensor, offset: tuple[int, ...], like: Tensor) -> Tensor:
    return whole[
        tuple(
            slice(start, start + size)
            for start, size in zip(offset, like.shape, strict=True)
        )
    ]


def _shard_of_whole(value: Tensor, parameter: DTensor) -> Tensor:
    """Return this rank's shard of a whole value, as a DTensor that is sharded like the parameter."""
    own_slice = dtensor_slice(parameter)
    own_part = _narrow_to_shard(value, own_slice.offset, own_slice.data).to(
        own_slice.data.device, copy=True
    )
    return like_parameter(own_part, parameter)
