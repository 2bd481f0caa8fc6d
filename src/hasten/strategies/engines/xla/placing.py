"""The transform that puts a model on XLA devices, whole on each or sharded over them."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hasten import trees
from hasten.data.source import Item
from hasten.optional import need
from hasten.precision.base import Precision
from hasten.runtime.context import ProcessContext
from hasten.strategies.base import Stage, Wish
from hasten.strategies.blocks import repeated_blocks
from hasten.strategies.placing import Place

AXIS: Final = "data"


@dataclass(frozen=True, slots=True)
class Devices:
    """Every device of the host; tensors are global, and the compiler keeps the parts."""

    count: int
    kind: str
    device: torch.device
    mesh: Any
    """torch_xla's mesh of one axis."""

    @classmethod
    def all(cls) -> Devices:
        """Return the devices this process drives."""
        runtime, spmd = need("torch_xla.runtime"), need("torch_xla.distributed.spmd")
        count = int(runtime.global_runtime_device_count())
        return cls(
            count, str(runtime.device_type()), need("torch_xla").device(), spmd.Mesh(range(count), (count,), (AXIS,))
        )

    def divides(self, size: int) -> bool:
        """Whether a dimension of this size is shared; uneven parts make XLA's partitioner abort the process (torch_xla 2.9)."""
        return self.count > 1 and size > 0 and size % self.count == 0

    def shard(self, tensor: Tensor, dim: int = 0) -> None:
        """Lay a tensor on the devices so that each holds a part of `dim`, where it can be divided; numbers stay what they are."""
        if self.divides(tensor.shape[dim]):
            need("torch_xla.distributed.spmd").mark_sharding(tensor, self.mesh, self._spec(tensor.ndim, dim))

    def send(self, tensor: Tensor, dim: int | None = 0) -> Tensor:
        """A host tensor on the devices, `dim` divided over them; whole on each where it cannot be, or without one."""
        sharding = None
        if dim is not None and tensor.ndim and self.divides(tensor.shape[dim]):
            sharding = need("torch_xla.distributed.spmd").ShardingSpec(self.mesh, self._spec(tensor.ndim, dim))
        sent: Tensor = need("torch_xla.core.xla_model").send_cpu_data_to_device([tensor], self.device, sharding)[0]
        return sent

    def _spec(self, ndim: int, dim: int) -> tuple[str | None, ...]:
        return tuple(AXIS if index == dim else None for index in range(ndim))


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
        """Return a host tensor on the devices, laid out as a parameter of its shape is."""
        return self._devices.send(tensor, self._dim(tensor) if self._shards else None)

    def _shard(self, tensor: Tensor) -> None:
        if (dim := self._dim(tensor)) is not None:
            self._devices.shard(tensor, dim)

    def _dim(self, tensor: Tensor) -> int | None:
        """Return the largest dimension that the devices can share; without one a tensor stays whole."""
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


# Any in this file: batches are the user's own objects.


class Transfer:
    """Copies batches to the devices in the background, `depth` of them ahead of the one in use."""

    def __init__(self, devices: Devices, depth: int, skip_keys: Collection[str] = ()) -> None:
        self._devices = devices
        self._depth = depth
        self._skip_keys = frozenset(skip_keys)
        self._sync = need("torch_xla").sync

    def __call__(self, items: Iterator[Item]) -> Iterator[Item]:
        """Yield the batches on the devices. What the loop recorded with one is run when it asks for the next."""
        queue: deque[tuple[Future[Any], tuple[Any, bool, Any]]] = deque()
        with ThreadPoolExecutor(1, thread_name_prefix="hasten-xla") as pool:
            for batch, *rest in items:
                queue.append((pool.submit(self._put, batch), (rest[0], rest[1], rest[2])))
                if len(queue) > self._depth:
                    yield self._next(queue)
            while queue:
                yield self._next(queue)
        self._sync()

    def _next(self, queue: deque[tuple[Future[Any], tuple[Any, bool, Any]]]) -> Item:
        self._sync()
        sent, rest = queue.popleft()
        return sent.result(), *rest

    def _put(self, batch: Any) -> Any:
        if isinstance(batch, Tensor):
            return self._devices.send(batch) if batch.device.type == "cpu" else batch
        if not trees.is_container(batch):
            return trees.to_device(batch, self._devices.device)
        parts = [part if key in self._skip_keys else self._put(part) for key, part in trees.children(batch)]
        return trees.rebuild(batch, parts)
