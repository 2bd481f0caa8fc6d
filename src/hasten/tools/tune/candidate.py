"""One way to train: strategy, mesh, precision, recompute, offload and micro-batch, as data. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from hasten.runtime.axes import BATCH, Axis, MeshSpec
from hasten.runtime.mesh_plan import mesh_title
from hasten.tools.plan.traced import PrecisionName


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One point of the search."""

    mesh: MeshSpec
    sharded: bool = False
    """Whether parameters are sharded (FSDP2) rather than copied (DDP)."""
    precision: PrecisionName = "bf16"
    recompute: bool = False
    reshard: bool = True
    """Whether gathered parameters are freed after the forward."""
    offload: bool = False
    """Whether parameters, gradients and optimizer state lie in host memory."""
    micro_batch: int = 1
    micro_steps: int = 1

    @property
    def strategy(self) -> str:
        """The strategy as settings name it."""
        if self.sharded:
            return "fsdp"
        return "ddp" if self.mesh.world_size > 1 else "none"

    @property
    def global_batch(self) -> int:
        """Samples in one update."""
        return self.micro_batch * self.micro_steps * self.mesh.size(*BATCH)

    @property
    def words(self) -> str:
        """Strategy and mesh, for tables."""
        axes = mesh_title(self.mesh)
        kept = "" if self.reshard or not self.sharded or self.mesh.size(Axis.DP_SHARD) == 1 else ", parameters kept"
        return f"{self.strategy} ({axes}{kept})" if axes else self.strategy
