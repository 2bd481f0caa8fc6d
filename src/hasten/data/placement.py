"""Transfer settings of a prepared loader: pinned memory, read-ahead depth, and copies to the device."""

from __future__ import annotations

from typing import Any, Final

import torch
from torch.utils.data import DataLoader

from hasten import trees
from hasten.config.sections.loop import DataLoaderConfiguration
from hasten.data.loader import MakeMove, Move, plain_move
from hasten.data.prefetch import LookAhead, Prefetch
from hasten.data.source import Ahead
from hasten.runtime.devices import kind_of
from hasten.runtime.logs import get_logger

log = get_logger(__name__)

_DEFAULT_DEPTH: Final = 2


def pins(loader: DataLoader[Any], device: torch.device | None, config: DataLoaderConfiguration) -> bool:
    """Return True if `pin_memory` is to be enabled for a loader that leaves it off.

    With workers, torch then receives and pins batches in a separate thread, off the training loop.
    """
    if loader.pin_memory or device is None or device.type != "cuda" or config.dispatch_batches:
        return False
    if config.pin_memory is None and loader.num_workers:
        log.info(
            "pin_memory=True is set for a loader with %d workers, so that a thread receives its batches in parallel with the training "
            "loop; DataLoaderConfiguration(pin_memory=False) turns this off",
            loader.num_workers,
        )
        return True
    return bool(config.pin_memory)


def depth_of(device: torch.device | None, config: DataLoaderConfiguration, transfer: MakeMove | None = None) -> int:
    """Return the number of batches read ahead of the one in use."""
    if device is None:
        return 0
    if device.type == "cpu":
        return config.prefetch or 0
    depth = _DEFAULT_DEPTH if config.prefetch is None else config.prefetch
    return depth if transfer is not None or kind_of(device).side_streams else 0


def ahead_of(depth: int, device: torch.device | None, transfer: MakeMove | None) -> Ahead:
    """Return the read-ahead mode: only large batches are read ahead if a side stream copies them."""
    if not depth:
        return "never"
    always = transfer is not None or device is None or device.type == "cpu"
    return "always" if always else "when large"


def move_of(
    device: torch.device | None, config: DataLoaderConfiguration, transfer: MakeMove | None = None
) -> Move | None:
    """Return the function that moves batches to the device; None when they are not moved."""
    if device is None:
        return None
    depth = depth_of(device, config, transfer)
    if transfer is not None:
        return transfer(depth, config.prefetch_skip_keys or ())
    if device.type == "cpu":
        return LookAhead(depth) if depth else None
    if depth:
        return Prefetch(device, depth, config.prefetch_skip_keys)

    def put(batch: Any) -> Any:  # Any: a batch of the user's
        return trees.to_device(batch, device, config.non_blocking, config.prefetch_skip_keys)

    return plain_move(put)
