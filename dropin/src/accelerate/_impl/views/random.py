"""Seeds and random states."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from accelerate._impl import ambient
from accelerate._impl.enums import RNGType
from hasten.runtime import seeding
from hasten.runtime.seeding import set_seed as set_seed


def synchronize_rng_state(rng_type: RNGType | None = None, generator: torch.Generator | None = None) -> None:
    """Give every process the state the main process has. Ranks: every rank."""
    if rng_type is not None:
        synchronize_rng_states([rng_type], generator)


def synchronize_rng_states(rng_types: Iterable[str | RNGType], generator: torch.Generator | None = None) -> None:
    """Give every process the states the main process has. Ranks: every rank."""
    names: list[str] = [str(RNGType(kind)) for kind in rng_types]
    assert generator is not None or "generator" not in names, "Need a generator to synchronize its seed."
    world: Any = ambient.start().world
    if names and world.size > 1:
        seeding.synchronize_rng_states(names, world, generator)
