"""ProcessContext: the facts about the current process. Passed as an argument, never global."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from hasten.comm.base import Comm
from hasten.comm.collective_log import CollectiveRecord
from hasten.runtime.mesh_plan import MeshSpec
from hasten.runtime.topology import Topology


@dataclass(frozen=True, slots=True)
class ProcessContext:
    """The process's rank, its device, and its process groups."""

    topology: Topology
    mesh: MeshSpec
    device: torch.device
    world: Comm
    groups: Callable[..., Comm]
    """`groups(*axes)`: communicator over the peers along those mesh axes. Ranks: every rank, in the same order."""
    collectives: CollectiveRecord = field(default_factory=CollectiveRecord)
    """Log of the latest collective of this process."""

    @property
    def rank(self) -> int:
        """The global rank of this process."""
        return self.topology.rank

    @property
    def is_main(self) -> bool:
        """True on rank 0 of the world."""
        return self.topology.rank == 0

    @property
    def is_local_main(self) -> bool:
        """True on the first rank of its node."""
        return self.topology.local_rank == 0
