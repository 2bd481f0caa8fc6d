"""Eight-bit optimizer state of torchao in checkpoints: its codes and scales as plain tensors, sliced like the parameter."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import prod
from typing import Any, Final

import torch
from torch import Tensor

from hasten.checkpoint.base import Slice, local_data
from hasten.checkpoint.format.formats import as_stored, dtensor_slice
from hasten.errors import CheckpointError
from hasten.modules.names import is_dtensor
from hasten.optional import need

# Any in this file: tensor classes of torchao, and state that is nested freely.
_KIND: Final = "OptimState8bit"
_MARK: Final = "tensor_class"


def is_eight_bit(tensor: Tensor) -> bool:
    """Return True for the eight-bit state of torchao's optimizers, on this rank or of a distributed tensor."""
    tensor_class = type(local_data(as_stored(tensor)))
    return (
        tensor_class.__name__ == _KIND
        and tensor_class.__module__.partition(".")[0] == "torchao"
    )


def eight_bit_entries(tensor: Tensor) -> dict[str, Any]:
    """Return the codes and scales of an eight-bit state, to be saved.

    Raises: CheckpointError for a state whose blocks do not lie in whole shards of equal size.
    """
    stored_state = as_stored(tensor)
    local_state: Any = local_data(stored_state)
    state_entries: dict[str, Any] = {_MARK: _KIND, "signed": bool(local_state.signed)}
    if not isinstance(stored_state, Slice):
        return {
            **state_entries,
            "codes": local_state.codes.detach(),
            "scale": local_state.scale.detach(),
        }
    num_rows = local_state.codes.shape[0]
    block_size = local_state.block_size
    first_value = stored_state.offset[0] * prod(stored_state.shape[1:])
    is_even = (
        stored_state.shape[0] % num_rows == 0
        and stored_state.offset[0] % num_rows == 0
        and not any(stored_state.offset[1:])
    )
    if (
        not is_even
        or tuple(local_state.codes.shape[1:]) != stored_state.shape[1:]
        or first_value % block_size
    ):
        raise CheckpointError(
            f"an eight-bit optimizer state of shape {stored_state.shape} has {num_rows} rows on this rank, so its blocks of {block_size} values are "
            "not those of the whole tensor and it could not be resumed on other ranks; use a number of ranks that divides the rows, "
            "or AdamW of torch."
        )
    scale_slice = replace(
        stored_state,
        data=local_state.scale.detach(),
        shape=(prod(stored_state.shape) // block_size,),
        offset=(first_value // block_size,),
    )
    return {
        **state_entries,
        "codes": replace(stored_state, data=local_state.codes.detach()),
        "scale": scale_slice,
    }


def is_entries(state_entries: Any) -> bool:
    """Return True for what `eight_bit_entries` returned, as loaded."""
    return isinstance(state_entries, Mapping) and state_entries.get(_MARK) == _KIND


def from_entries(state_entries: Mapping[str, Any], dtype: torch.dtype) -> Tensor:
    """Return the eight-bit state from its codes, sharded like the parameter, and all scales.

    Raises: CheckpointError when the blocks are split over ranks.
    """
    codes = state_entries["codes"]
    scale = state_entries["scale"]
    block_size = codes.numel() // scale.numel()
    local_codes = codes
    first_value = 0
    if is_dtensor(codes):
        codes_slice = dtensor_slice(codes)
        local_codes = codes_slice.data
        first_value = codes_slice.offset[0] * prod(codes_slice.shape[1:])
    if (
        first_value % block_size
        or local_codes.numel() % block_size
        or local_codes.numel() == 0
    ):
        raise CheckpointError(
            f"an eight-bit optimizer state of shape {tuple(codes.shape)} has blocks of {block_size} values, and this rank would hold "
            f"{local_codes.numel()} values from {first_value} on; blocks cannot be split. Nothing was loaded. Resume on a number of ranks that divides the "
            "rows into whole blocks."
        )
    torchao_module: Any = need(
        "torchao.optim.subclass_8bit", why="the optimizer's eight-bit state"
    )
    local_state: Any = torchao_module.OptimState8bit.zeros(
        local_codes.shape,
        bool(state_entries["signed"]),
        block_size,
        local_codes.device,
        dtype,
    )
    local_state.codes.copy_(local_codes)
    local_state.scale.copy_(
        scale[
            first_value // block_size : (first_value + local_codes.numel())
            // block_size
        ]
    )
    if not is_dtensor(codes):
        return local_state  # type: ignore[no-any-return]
    dtensor_class = type(codes)
    return dtensor_class.from_local(
        local_state,
        codes.device_mesh,
        codes.placements,
        run_check=False,
        shape=codes.shape,
        stride=codes.stride(),
    )
