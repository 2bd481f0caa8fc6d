"""The random generators of a process, as a checkpoint keeps them."""

from __future__ import annotations

import hashlib
import logging
import random
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from hasten.errors import CorruptCheckpointError
from hasten.runtime.seeding import RngState, set_seed

log = logging.getLogger(__name__)


class Randomness:
    """Captures and restores python's, numpy's, torch's and the device's generators."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def capture(self) -> dict[str, Any]:  # Any: tensors and numbers
        """The state of all generators, and the seed the run was started with."""
        return {"seed": torch.initial_seed(), "generators": RngState.capture(self._device).to_tree()}

    def holding(self) -> Callable[[], None]:
        """Returns what puts the generators back to where they are now."""
        state = RngState.capture(self._device)
        return lambda: state.restore(self._device)

    def restoring(self, saved: Any, strict: bool = True) -> Callable[[], None]:
        """Checks a saved state and returns what puts it in place.

        Raises: CorruptCheckpointError when it is not one.
        """
        state = RngState.from_tree(_checked(saved)["generators"])
        _try_out(state)
        return lambda: state.restore(self._device, "error" if strict else "warn")

    def deriving(self, saved: Any, rank: int, step: int) -> Callable[[], None]:
        """Returns what seeds the generators by (seed of the run, rank, step), for another number of processes."""
        digest = hashlib.sha256(f"{_checked(saved)['seed']}/{rank}/{step}".encode()).digest()
        seed = int.from_bytes(digest[:7], "little")

        def derive() -> None:
            set_seed(seed)

        return derive


def _checked(saved: Any) -> Mapping[str, Any]:
    if not isinstance(saved, Mapping) or not isinstance(saved.get("generators"), Mapping) or "seed" not in saved:
        raise CorruptCheckpointError("the file of random states holds something else. Nothing was loaded.")
    return saved


def _try_out(state: RngState) -> None:
    """Set generators that nobody uses, so that an impossible state is found before any real one changes."""
    try:
        words = tuple(state.python["words"].tolist())
        random.Random().setstate((state.python["version"], words, state.python["gauss"]))
        n = state.numpy
        position, has_gauss, gauss = n["position"], n["has_gauss"], n["gauss"]
        np.random.RandomState().set_state((n["kind"], n["words"].numpy().astype(np.uint32), position, has_gauss, gauss))
        torch.Generator().set_state(state.cpu)
    except (ValueError, TypeError, OverflowError, RuntimeError) as error:
        raise CorruptCheckpointError(
            f"the saved random state is impossible ({error}). Nothing was loaded; use another checkpoint."
        ) from error
