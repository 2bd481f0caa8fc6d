"""A boolean that any rank can raise and every rank sees: the ground of early stopping and preemption."""

from __future__ import annotations

import torch

from hasten.comm.base import Comm


class Flag:
    """Raised on one rank, seen on all at the next `check`."""

    def __init__(self, comm: Comm) -> None:
        self._comm = comm
        self._raised = False

    def set(self) -> None:
        """Raise the flag on this rank. Ranks: any."""
        self._raised = True

    def check(self) -> bool:
        """Whether any rank has raised it since the last time it was seen. Ranks: every rank of the group."""
        if self._comm.size > 1:
            mine = torch.tensor([self._raised], dtype=torch.int32)
            self._raised = bool(self._comm.all_reduce(mine, "max").item())
        seen, self._raised = self._raised, False
        return seen
