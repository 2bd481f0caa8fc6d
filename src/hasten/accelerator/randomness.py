"""The random generators of a process, as a checkpoint keeps them."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable
from typing import Any

import torch

from hasten.runtime.seeding import RngState, set_seed

log = logging.getLogger(__name__)


class Randomness:
    """Captures and restores python's, numpy's, torch's and the device's generators."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def capture(self) -> dict[str, Any]:  # Any: tensors and numbers
        """The state of all generators, and the seed the run was started with."""
        return {"seed": torch.initial_seed(), "generators": RngState.capture(self._device).to_tree()}

    def restoring(self, saved: Any, strict: bool = True) -> Callable[[], None]:
        """Checks a saved state and returns what puts it in place.

        Raises: CorruptCheckpointError when it is not one.
        """
        state = RngState.from_tree(saved["generators"])
        return lambda: state.restore(self._device, "error" if strict else "warn")

    def deriving(self, saved: Any, rank: int, step: int) -> Callable[[], None]:
        """Returns what seeds the generators by (seed of the run, rank, step), for another number of processes."""
        digest = hashlib.sha256(f"{saved['seed']}/{rank}/{step}".encode()).digest()
        seed = int.from_bytes(digest[:7], "little")

        def derive() -> None:
            set_seed(seed)

        return derive
