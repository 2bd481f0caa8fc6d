"""The devices of a host as torch_xla sees them: one mesh, along which batches and parameters are sharded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from hasten.optional import need

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
        """The devices this process drives."""
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
