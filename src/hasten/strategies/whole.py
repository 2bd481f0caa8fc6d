"""Unsharded tensors of a sharded model: averaged gradients of whole parameters, and the state dict on the main process."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from hasten.comm.base import Comm
from hasten.modules.names import is_dtensor, whole_of


class Averaged:
    """Gradient hook that averages over the ranks with different samples, in every backward."""

    def __init__(self, comm: Comm) -> None:
        self._comm = comm

    def __call__(self, grad: Tensor) -> Tensor:
        return self._comm.all_reduce(grad, "mean")


def scalar_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters without a dimension to shard along, such as a learned temperature."""
    scalar_parameters_by_name = {}
    for parameter_name, parameter in model.named_parameters():
        if parameter.ndim == 0:
            scalar_parameters_by_name[parameter_name] = parameter
    return scalar_parameters_by_name


def average_gradients(parameters: list[nn.Parameter], comm: Comm) -> None:
    """Register hooks that average the gradients of whole parameters, like FSDP does for its shards."""
    if comm.size == 1:
        return
    for parameter in parameters:
        if parameter.requires_grad:
            parameter.register_hook(Averaged(comm))  # type: ignore[no-untyped-call]  # torch leaves it untyped


@torch.no_grad()
# Any: tensors and extra state
def whole_on_main(model: nn.Module, is_main: bool) -> dict[str, Any]:
    """Return unsharded tensors in host memory on the main process; an empty dict elsewhere. Ranks: every rank."""
    # keep_vars, so that tied weights are one object under two names
    state = model.state_dict(keep_vars=True)
    host_tensors: dict[int, Any] = {}
    for value in state.values():
        if id(value) not in host_tensors:
            unsharded_tensor = whole_of(value) if is_dtensor(value) else value
            if is_main:
                host_tensors[id(value)] = _on_host(unsharded_tensor)
            else:
                host_tensors[id(value)] = None
    if is_main:
        return {name: host_tensors[id(value)] for name, value in state.items()}
    return {}


# Any: a tensor, or extra state, which is returned unchanged
def _on_host(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().cpu()
    return value
