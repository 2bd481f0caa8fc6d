"""Seeds and random states."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from accelerate._impl import ambient
from accelerate._impl.enums import RNGType
from accelerate._impl.views.state import AcceleratorState
from hasten.runtime import seeding


def set_seed(
    seed: int, device_specific: bool = False, deterministic: bool = False
) -> None:
    """Seed python, numpy, torch and every device; with `device_specific`, each process differently."""
    seeding.set_seed(
        seed + (AcceleratorState().process_index if device_specific else 0),
        deterministic=deterministic,
    )


def synchronize_rng_state(
    rng_type: RNGType | None = None, generator: torch.Generator | None = None
) -> None:
    """Give every process the state the main process has. Ranks: every rank."""
    assert generator is not None or rng_type != RNGType.GENERATOR, (
        "Need a generator to synchronize its seed."
    )
    assert rng_type != RNGType.XLA, (
        "Can't synchronize XLA seeds as torch_xla is unavailable."
    )
    if rng_type is not None and (world := ambient.start().world).size > 1:
        seeding.synchronize_rng_states([str(rng_type)], world, generator)


def synchronize_rng_states(
    rng_types: Iterable[str | RNGType], generator: torch.Generator | None = None
) -> None:
    """Give every process the states the main process has. Ranks: every rank."""
    for rng_type in rng_types:
        synchronize_rng_state(RNGType(rng_type), generator=generator)
