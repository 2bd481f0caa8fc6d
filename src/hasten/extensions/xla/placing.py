"""Transform that moves a model to XLA devices, replicated or sharded, and the transfer of batches to them."""

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
from hasten.strategies.base import PrepareRequest, Stage
from hasten.strategies.blocks import repeated_blocks
from hasten.strategies.native import PlaceOnDevice

AXIS: Final = "data"


@dataclass(frozen=True, slots=True)
class Devices:
    """All devices of the host; tensors are global, and the compiler manages their shards."""

    count: int
    kind: str
    device: torch.device
    mesh: Any
    """torch_xla's mesh, with one axis."""

    @classmethod
    def all(cls) -> Devices:
        """Return the devices of this process."""
        runtime = need("torch_xla.runtime")
        spmd = need("torch_xla.distributed.spmd")
        count = int(runtime.global_runtime_device_count())
        return cls(
            count,
            str(runtime.device_type()),
            need("torch_xla").device(),
            spmd.Mesh(range(count), (count,), (AXIS,)),
        )

    def divides_evenly(self, size: int) -> bool:
        """Return whether a dimension of this size is sharded; XLA's partitioner aborts on uneven shards (torch_xla 2.9)."""
        return self.count > 1 and size > 0 and size % self.count == 0

    def shard_tensor(self, tensor: Tensor, dim: int = 0) -> None:
        """Shard a tensor along `dim` over the devices, if the dimension is divisible; values do not change."""
        if self.divides_evenly(tensor.shape[dim]):
            need("torch_xla.distributed.spmd").mark_sharding(
                tensor, self.mesh, self._make_spec(tensor.ndim, dim)
            )

    def send_tensor(self, tensor: Tensor, dim: int | None = 0) -> Tensor:
        """Copy a host tensor to the devices, sharded along `dim` if it is divisible, else replicated."""
        sharding = None
        if dim is not None and tensor.ndim and self.divides_evenly(tensor.shape[dim]):
            sharding = need("torch_xla.distributed.spmd").ShardingSpec(
                self.mesh, self._make_spec(tensor.ndim, dim)
            )
        sent: Tensor = need("torch_xla.core.xla_model").send_cpu_data_to_device(
            [tensor], self.device, sharding
        )[0]
        return sent

    def _make_spec(self, ndim: int, dim: int) -> tuple[str | None, ...]:
        return tuple(AXIS if index == dim else None for index in range(ndim))


class PlaceOnDevices:
    """Transform that moves parameters and buffers; tied tensors stay tied, and parameters keep their attributes."""

    stage = Stage.PLACE

    def __init__(self, devices: Devices, shards: bool) -> None:
        self._devices = devices
        self._shards = shards

    def apply(
        self,
        model: nn.Module,
        request: PrepareRequest,
        ctx: ProcessContext,
        precision: Precision,
    ) -> nn.Module:
        parameters = dict(model.named_parameters(remove_duplicate=False))
        buffers = dict(model.named_buffers(remove_duplicate=False))
        model = PlaceOnDevice().apply(model, request, ctx, precision)
        if request.place:  # .to() makes a new tensor per name on this kind of device
            _tie_again(
                model, parameters, dict(model.named_parameters(remove_duplicate=False))
            )
            _tie_again(
                model, buffers, dict(model.named_buffers(remove_duplicate=False))
            )
        if self._shards and request.train and self._devices.count > 1:
            for parameter in model.parameters():
                self._shard_tensor(parameter)
            for module in (model, *(block for _, block in repeated_blocks(model))):
                module.register_forward_hook(ShardOutput(self._devices))
        return model

    def undo(self, model: nn.Module) -> nn.Module:
        return model

    def place_state(self, optimizer: Optimizer) -> None:
        """Shard an optimizer's state over the devices like its parameters."""
        if not self._shards or self._devices.count == 1:
            return
        for parameter, values in optimizer.state.items():
            for value in values.values():
                if (
                    isinstance(value, Tensor)
                    and value.device == parameter.device
                    and value.shape == parameter.shape
                ):
                    self._shard_tensor(value)

    def send_tensor(self, tensor: Tensor) -> Tensor:
        """Copy a host tensor to the devices, sharded like a parameter of its shape."""
        return self._devices.send_tensor(
            tensor, self._find_dim(tensor) if self._shards else None
        )

    def _shard_tensor(self, tensor: Tensor) -> None:
        if (dim := self._find_dim(tensor)) is not None:
            self._devices.shard_tensor(tensor, dim)

    def _find_dim(self, tensor: Tensor) -> int | None:
        """Return the largest dimension that is divisible by the number of devices; None if there is none."""
        dims = []
        for dim, size in enumerate(tensor.shape):
            if self._devices.divides_evenly(size):
                dims.append(dim)
        return max(dims, key=lambda dim: tensor.shape[dim]) if dims else None


class ShardOutput:
    """Forward hook that keeps activations sharded by samples, so that parameters are gathered instead of activations."""

    def __init__(self, devices: Devices) -> None:
        self._devices = devices

    # Any: the user's arguments and outputs
    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        for tensor in trees.tensors(output):
            if tensor.ndim > 1 and tensor.device.type == "xla":
                self._devices.shard_tensor(tensor)


def _tie_again(
    model: nn.Module, old_tensors: dict[str, Any], new_tensors: dict[str, Any]
) -> None:
    """Tie the names again that shared a tensor before, and copy its attributes."""
    first_names: dict[int, str] = {}
    for name, old_tensor in old_tensors.items():
        new_tensor = new_tensors[first_names.setdefault(id(old_tensor), name)]
        if new_tensor is not old_tensor and first_names[id(old_tensor)] == name:
            new_tensor.__dict__.update(old_tensor.__dict__)
        owner, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(owner), attribute, new_tensor)


# Any in this file: the user's batches.


class Transfer:
    """Background copy of batches to the devices, `depth` batches ahead of the one in use."""

    def __init__(
        self, devices: Devices, depth: int, skip_keys: Collection[str] = ()
    ) -> None:
        self._devices = devices
        self._depth = depth
        self._skip_keys = frozenset(skip_keys)
        self._sync = need("torch_xla").sync

    def __call__(self, items: Iterator[Item]) -> Iterator[Item]:
        """Yield the batches on the devices. Operations recorded with a batch run when the next one is requested."""
        queue: deque[tuple[Future[Any], tuple[Any, bool, Any]]] = deque()
        with ThreadPoolExecutor(1, thread_name_prefix="hasten-xla") as pool:
            for batch, *batch_facts in items:
                queue.append(
                    (
                        pool.submit(self._send_batch, batch),
                        (batch_facts[0], batch_facts[1], batch_facts[2]),
                    )
                )
                if len(queue) > self._depth:
                    yield self._next_item(queue)
            while queue:
                yield self._next_item(queue)
        self._sync()

    def _next_item(
        self, queue: deque[tuple[Future[Any], tuple[Any, bool, Any]]]
    ) -> Item:
        self._sync()
        sent_batch, batch_facts = queue.popleft()
        return sent_batch.result(), *batch_facts

    def _send_batch(self, batch: Any) -> Any:
        if isinstance(batch, Tensor):
            is_on_host = batch.device.type == "cpu"
            return self._devices.send_tensor(batch) if is_on_host else batch
        if not trees.is_container(batch):
            return trees.to_device(batch, self._devices.device)
        sent_parts = []
        for key, member in trees.children(batch):
            sent_parts.append(
                member if key in self._skip_keys else self._send_batch(member)
            )
        return trees.rebuild(batch, sent_parts)
