"""The transform that puts a model on XLA devices, whole on each or sharded over them."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from hasten import trees
from hasten.precision.base import Precision
from hasten.runtime.context import ProcessContext
from hasten.strategies.base import Stage, Wish
from hasten.strategies.blocks import repeated_blocks
from hasten.strategies.engines.xla.devices import Devices
from hasten.strategies.placing import Place


class PlaceOnDevices:
    """Moves parameters and buffers; ties between them and attributes of parameters are kept."""

    stage = Stage.PLACE

    def __init__(self, devices: Devices, shards: bool) -> None:
        self._devices = devices
        self._shards = shards

    def apply(self, model: nn.Module, wish: Wish, ctx: ProcessContext, precision: Precision) -> nn.Module:
        parameters = dict(model.named_parameters(remove_duplicate=False))
        buffers = dict(model.named_buffers(remove_duplicate=False))
        model = Place().apply(model, wish, ctx, precision)
        if wish.place:  # .to() makes new tensors on this kind of device, one for each name
            _tie(model, parameters, dict(model.named_parameters(remove_duplicate=False)))
            _tie(model, buffers, dict(model.named_buffers(remove_duplicate=False)))
        if self._shards and wish.train and self._devices.count > 1:
            for parameter in model.parameters():
                self._shard(parameter)
            for module in (model, *(block for _, block in repeated_blocks(model))):
                module.register_forward_hook(ShardOutput(self._devices))
        return model

    def undo(self, model: nn.Module) -> nn.Module:
        return model

    def place_state(self, optimizer: Optimizer) -> None:
        """Lay an optimizer's state on the devices as its parameters are."""
        if not self._shards or self._devices.count == 1:
            return
        for parameter, values in optimizer.state.items():
            for value in values.values():
                if isinstance(value, Tensor) and value.device == parameter.device and value.shape == parameter.shape:
                    self._shard(value)

    def send(self, tensor: Tensor) -> Tensor:
        """A host tensor on the devices, laid out as a parameter of its shape is."""
        return self._devices.send(tensor, self._dim(tensor) if self._shards else None)

    def _shard(self, tensor: Tensor) -> None:
        if (dim := self._dim(tensor)) is not None:
            self._devices.shard(tensor, dim)

    def _dim(self, tensor: Tensor) -> int | None:
        """The largest dimension that the devices can share; without one a tensor stays whole."""
        dims = [dim for dim, size in enumerate(tensor.shape) if self._devices.divides(size)]
        return max(dims, key=lambda dim: tensor.shape[dim]) if dims else None


class ShardOutput:
    """A forward hook that keeps activations divided by samples, so that parameters are gathered and not activations."""

    def __init__(self, devices: Devices) -> None:
        self._devices = devices

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:  # Any: the user's own arguments and outputs
        for tensor in trees.tensors(output):
            if tensor.ndim > 1 and tensor.device.type == "xla":
                self._devices.shard(tensor)


def _tie(model: nn.Module, before: dict[str, Any], after: dict[str, Any]) -> None:
    """Give the names that shared a tensor before the same one again, with the attributes it had."""
    first: dict[int, str] = {}
    for name, old in before.items():
        new = after[first.setdefault(id(old), name)]
        if new is not old and first[id(old)] == name:
            new.__dict__.update(old.__dict__)
        owner, _, key = name.rpartition(".")
        setattr(model.get_submodule(owner), key, new)
