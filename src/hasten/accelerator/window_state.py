"""What lives inside torch's wrappers between two updates: gathered gradients, and the order of DDP's buckets."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from hasten.checkpoint.reshard import local_tensor
from hasten.modules.dtensors import is_dtensor, is_fsdp_module

_UNSHARDED = "unsharded/"  # whole gradients that no rank has reduced yet
_PARTIAL = "partial/"  # reduced over shards, not yet over replicas


# -- gradients of a window in progress ----------------------------------------------------------------------------
def gradients(models: Sequence[nn.Module], names: Mapping[int, str]) -> dict[str, Tensor]:
    """What a window in progress has gathered on this rank, by parameter name."""
    found = {
        names[id(parameter)]: local_tensor(parameter.grad).detach()
        for model in models
        for parameter in model.parameters()
        if parameter.grad is not None
    }
    for group in _sharded_groups(models):
        if group._partial_reduce_output is not None:
            found[_PARTIAL + _group_name(group, names)] = group._partial_reduce_output.detach()
        for held in group.fsdp_params:
            gathered = held.unsharded_accumulated_grad
            if gathered is None and getattr(held, "_unsharded_param", None) is not None:
                gathered = held._unsharded_param.grad
            if gathered is not None:
                found[_UNSHARDED + names[id(held.sharded_param)]] = local_tensor(gathered).detach()
    return found


def _group_name(group: Any, names: Mapping[int, str]) -> str:
    return names[id(group.fsdp_params[0].sharded_param)]


def movable(saved: Iterable[str]) -> bool:
    """Whether these gradients can be shared out over another number of processes."""
    return not any(key.startswith(_PARTIAL) for key in saved)


def put_gradients(models: Sequence[nn.Module], names: Mapping[int, str], saved: Mapping[str, Tensor]) -> None:
    """Give parameters the gradients of the window in progress, and no others."""
    for model in models:
        for parameter in model.parameters():
            gradient = saved.get(names[id(parameter)])
            if gradient is None:
                parameter.grad = None
            elif is_dtensor(parameter):
                room = torch.empty_like(parameter, requires_grad=False)
                local_tensor(room).copy_(gradient)
                parameter.grad = room
            else:
                parameter.grad = gradient.to(parameter.device, copy=True)
    for group in _sharded_groups(models):
        partial = saved.get(_PARTIAL + _group_name(group, names))
        device = local_tensor(group.fsdp_params[0].sharded_param).device
        group._partial_reduce_output = None if partial is None else partial.to(device, copy=True)
        for held in group.fsdp_params:
            gathered = saved.get(_UNSHARDED + names[id(held.sharded_param)])
            held.unsharded_accumulated_grad = None if gathered is None else gathered.to(device, copy=True)


def _sharded_groups(models: Sequence[nn.Module]) -> Iterator[Any]:
    """FSDP's own records of its parameters, which hold gradients between reductions. Any: not public in torch."""
    for model in models:
        for module in model.modules():
            if is_fsdp_module(module):
                state: Any = module._get_fsdp_state()
                # torch<2.12 has one group per module, later ones a list of them.
                groups = getattr(state, "_fsdp_param_groups", None) or [getattr(state, "_fsdp_param_group", None)]
                yield from (group for group in groups if group is not None and group.fsdp_params)


# -- DDP's buckets ------------------------------------------------------------------------------------------------
def bucket_order(model: nn.Module) -> list[int] | None:
    """The order in which DDP packs gradients after its first step; None when it packs as it did at first.

    Sums over more than two ranks depend on this order in their last bits, so an exact resume needs it.
    """
    if not _reorders(model):
        return None
    ddp: Any = model  # Any: the reducer is not public in torch
    ddp.reducer._rebuild_buckets()  # what the next forward would do; false when it is done or too early
    ddp.logger.set_runtime_stats_and_log()
    listed = ddp._get_ddp_logging_data().get("rebuilt_per_bucket_param_indices")
    return None if not listed else [int(number) for number in str(listed).replace(",", " ").split()]


def _reorders(model: nn.Module) -> bool:
    if not isinstance(model, DistributedDataParallel):
        return False
    ddp: Any = model
    return not (ddp.static_graph or ddp.find_unused_parameters or ddp._comm_hooks)


def replay_order(model: nn.Module, order: Sequence[int]) -> None:
    """Show DDP the order once, with gradients of zero, so that it packs as the saved run did. Ranks: every rank.

    To be called before parameters and gradients are restored.
    """
    if not _reorders(model):
        return
    ddp: Any = model
    trainable = [p for p in ddp.module.parameters() if p.requires_grad]
    if ddp._has_rebuilt_buckets or sorted(order) != list(range(len(trainable))):
        return
    own, training, sync = ddp.module, ddp.training, ddp.require_forward_param_sync
    ddp.module = _InOrder([trainable[index] for index in order])
    ddp.require_forward_param_sync = False  # there are no buffers to bring into line now
    try:
        with torch.enable_grad():
            ddp().backward()
    finally:
        ddp.module = own
        ddp.train(training)
        ddp.require_forward_param_sync = sync
        for parameter in trainable:
            parameter.grad = None


class _InOrder(nn.Module):
    """Makes gradients of zero become ready in a given order."""

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        super().__init__()
        self._in_order = tuple(parameters)  # a tuple, so that they are not registered a second time

    def forward(self) -> Tensor:
        """Zero; backward visits the parameters in their order, because it goes through this sum from its end."""
        total = torch.zeros((), device=self._in_order[0].device)
        for parameter in reversed(self._in_order):
            total = total + 0.0 * parameter.detach().new_ones(()) * parameter.reshape(-1)[0].float()
        return total
