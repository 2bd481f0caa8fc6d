"""A loader's position in the order of an epoch, common to all ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec

Unit = Literal["samples", "batches", "stream"]
Count = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]

Part = tuple[Count, Count | None]
"""The number of shards, and the number of units of this rank's shard, if known."""

Witness = tuple[Count, Count]
"""The number of units at the start of the order that were checked, and their checksum."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """Common position of all ranks in the global order of an epoch."""

    epoch: Count = 0
    consumed: Count = 0
    """Number of units of the epoch's global order that the ranks have returned."""
    seed: int = 0
    generator: Mapping[str, Any] | None = None
    """State of the user's sampler at the start of the epoch, on the rank that draws (see CarriedState)."""
    witness: Witness | None = None
    """Checksum of the start of the epoch's order, if it is drawn from a sampler of the user."""
    stream: Mapping[str, Any] | None = None
    """Additional state of a stream: positions of its workers."""
    ahead: bool = False
    """True if batches from here on are read ahead of their use, each under separate random states."""
    part: Part | None = None
    """The shard that the count refers to, if every rank has separate map-style data."""
    batches: Count = 0
    """Number of this rank's batches of the epoch before this position, if they were counted: for streams, and by skipping."""

    def begin(self, epoch: int) -> Position:
        """Return the start of `epoch`."""
        return Position(epoch=epoch, seed=self.seed)
