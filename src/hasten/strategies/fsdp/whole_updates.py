"""Optimizers whose update of an element depends on the whole parameter: sharded parameters are gathered one by one."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor, nn
from torch.optim import Adafactor, Optimizer

from hasten.checkpoint.reshard import dtensor_slice
from hasten.errors import StepError
from hasten.modules.names import is_dtensor, placements

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

_MARK: Final = "updates_wholes"


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
    def __call__(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:  # Any: step()'s
        if len(args) > 1 or kwargs.get("closure") is not None:  # the first argument is the optimizer
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
                        _update(optimizer, group, parameter)
        finally:
            optimizer.param_groups = groups
            for group, members in zip(groups, params, strict=True):
                group["params"] = members
        self._params = params
        for group in groups:
            group["params"] = []

    def put_back(self, optimizer: Optimizer, args: object, kwargs: object) -> None:
        """Restore the parameters of the groups."""
        for group, members in zip(optimizer.param_groups, self._params or [], strict=True):
            group["params"] = members
        self._params = None


def _update(optimizer: Optimizer, group: dict[str, Any], parameter: Tensor) -> None:
    """Update one parameter. Ranks: every rank that holds a shard of it."""
    step = inspect.unwrap(type(optimizer).step)  # without hooks, which run once per step
    if not is_dtensor(parameter):
        group["params"] = [parameter]
        step(optimizer)
        return
    assert parameter.grad is not None, "it has a gradient"
    whole = nn.Parameter(_whole(parameter), requires_grad=False)
    whole.grad = _whole(parameter.grad)
    state = optimizer.state.pop(parameter, {})
    if state:
        optimizer.state[whole] = {k: _whole(v) if is_dtensor(v) else v for k, v in state.items()}
    group["params"] = [whole]
    step(optimizer)
    made = optimizer.state.pop(whole)
    optimizer.state[parameter] = {
        key: _spread(value, parameter) if isinstance(value, Tensor) and value.shape == parameter.shape else value
        for key, value in made.items()
    }
    own = dtensor_slice(parameter)
    own.data.copy_(_part(whole, own.offset, own.data))


def _whole(tensor: Tensor) -> Tensor:
    if not is_dtensor(tensor):
        return tensor
    where = tensor.device_mesh.device_type
    if tensor.device.type != where:  # shards in host memory, which the group cannot gather
        local = placements().DTensor.from_local(
            tensor.to_local().to(where),
            tensor.device_mesh,
            tensor.placements,
            run_check=False,
            shape=tensor.shape,
            stride=tensor.stride(),
        )
        gathered: Tensor = local.full_tensor().detach()
        return gathered
    return tensor.full_tensor().detach()


def _part(whole: Tensor, offset: tuple[int, ...], like: Tensor) -> Tensor:
    return whole[tuple(slice(start, start + size) for start, size in zip(offset, like.shape, strict=True))]


def _spread(value: Tensor, parameter: DTensor) -> Tensor:
    """Return this rank's shard of a whole value, as a DTensor that is sharded like the parameter."""
    own = dtensor_slice(parameter)
    part = _part(value, own.offset, own.data).to(own.data.device, copy=True)
    made: Tensor = placements().DTensor.from_local(
        part,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
    return made
