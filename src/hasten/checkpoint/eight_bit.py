"""Eight-bit optimizer state of torchao in checkpoints: its codes and scales as plain tensors, sliced like the parameter."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import prod
from typing import Any, Final

import torch
from torch import Tensor

from hasten.checkpoint.base import Slice, as_stored, dtensor_slice, local_data
from hasten.errors import CheckpointError
from hasten.modules.names import is_dtensor
from hasten.optional import need

# Any in this file: tensor classes of torchao, and state that is nested freely.
_KIND: Final = "OptimState8bit"
_MARK: Final = "tensor_class"


def is_eight_bit(tensor: Tensor) -> bool:
    """Return True for the eight-bit state of torchao's optimizers, on this rank or of a distributed tensor."""
    kind = type(local_data(as_stored(tensor)))
    return kind.__name__ == _KIND and kind.__module__.partition(".")[0] == "torchao"


def eight_bit_entries(tensor: Tensor) -> dict[str, Any]:
    """Return the codes and scales of an eight-bit state, to be saved.

    Raises: CheckpointError for a state whose blocks do not lie in whole shards of equal size.
    """
    found = as_stored(tensor)
    local: Any = local_data(found)
    entries: dict[str, Any] = {_MARK: _KIND, "signed": bool(local.signed)}
    if not isinstance(found, Slice):
        return {**entries, "codes": local.codes.detach(), "scale": local.scale.detach()}
    rows, block = local.codes.shape[0], local.block_size
    start = found.offset[0] * prod(found.shape[1:])
    even = (
        found.shape[0] % rows == 0
        and found.offset[0] % rows == 0
        and not any(found.offset[1:])
    )
    if not even or tuple(local.codes.shape[1:]) != found.shape[1:] or start % block:
        raise CheckpointError(
            f"an eight-bit optimizer state of shape {found.shape} has {rows} rows on this rank, so its blocks of {block} values are "
            "not those of the whole tensor and it could not be resumed on other ranks; use a number of ranks that divides the rows, "
            "or AdamW of torch."
        )
    scale = replace(
        found,
        data=local.scale.detach(),
        shape=(prod(found.shape) // block,),
        offset=(start // block,),
    )
    return {
        **entries,
        "codes": replace(found, data=local.codes.detach()),
        "scale": scale,
    }


def is_entries(value: Any) -> bool:
    """Return True for what `eight_bit_entries` returned, as loaded."""
    return isinstance(value, Mapping) and value.get(_MARK) == _KIND


def from_entries(entries: Mapping[str, Any], dtype: torch.dtype) -> Tensor:
    """Return the eight-bit state from its codes, sharded like the parameter, and all scales.

    Raises: CheckpointError when the blocks are split over ranks.
    """
    codes, scale = entries["codes"], entries["scale"]
    block, local, start = codes.numel() // scale.numel(), codes, 0
    if is_dtensor(codes):
        place = dtensor_slice(codes)
        local, start = place.data, place.offset[0] * prod(place.shape[1:])
    if start % block or local.numel() % block or local.numel() == 0:
        raise CheckpointError(
            f"an eight-bit optimizer state of shape {tuple(codes.shape)} has blocks of {block} values, and this rank would hold "
            f"{local.numel()} values from {start} on; blocks cannot be split. Nothing was loaded. Resume on a number of ranks that divides the "
            "rows into whole blocks."
        )
    library: Any = need(
        "torchao.optim.subclass_8bit", why="the optimizer's eight-bit state"
    )
    made: Any = library.OptimState8bit.zeros(
        local.shape, bool(entries["signed"]), block, local.device, dtype
    )
    made.codes.copy_(local)
    made.scale.copy_(scale[start // block : (start + local.numel()) // block])
    if not is_dtensor(codes):
        return made  # type: ignore[no-any-return]
    kind = type(codes)
    return kind.from_local(
        made,
        codes.device_mesh,
        codes.placements,
        run_check=False,
        shape=codes.shape,
        stride=codes.stride(),
    )
