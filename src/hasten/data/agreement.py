"""What all ranks must have in common before a loader is split over them, compared once at prepare."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hasten.comm.base import Comm
from hasten.errors import DataError


def agree_on_loader(facts: Mapping[str, Any], seed: int, comm: Comm) -> int:
    """The first rank's seed, after every rank was found to have the same loader.

    Ranks: every rank. Raises: DataError on every rank, naming who has what.
    """
    if comm.size == 1:
        return seed
    told: list[tuple[dict[str, Any], int]] = comm.all_gather_object((dict(facts), seed))
    for name in facts:
        values = [others.get(name) for others, _ in told]
        if any(value != values[0] for value in values):
            table = ", ".join(f"rank {comm.ranks[member]}: {value}" for member, value in enumerate(values))
            raise DataError(
                f"the ranks prepare loaders that differ in {name} ({table}), so some would run out of batches while "
                f"the others wait for them. Give every rank the whole dataset and the same settings; prepare() splits it."
            )
    return told[0][1]
