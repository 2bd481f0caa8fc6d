"""Backward through streamed weights: what autograd would keep of them is noted, and fetched again when it is needed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from hasten.bigmodel.packs import Pack
from hasten.bigmodel.stream import Streamer


@dataclass(frozen=True, slots=True)
class _Note:
    """A weight that backward will need: which pack it is part of, and how it lay there."""

    pack: Pack
    offset: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]


class SavedWeights:
    """Stands between autograd and the streamer: by the time of backward, a weight's memory holds other weights."""

    def __init__(self, streamer: Streamer) -> None:
        self._streamer = streamer

    def watching(self) -> saved_tensors_hooks:
        """Context manager for a forward whose weights leave the device afterwards."""
        return saved_tensors_hooks(self._pack, self._unpack)

    def _pack(self, tensor: Tensor) -> Any:  # Any: what autograd keeps for the backward
        if not self._streamer.holds(tensor):
            return tensor
        found = self._streamer.locate(tensor)
        if found is None:
            return tensor.clone()
        return _Note(found[0], found[1], tensor.dtype, tuple(tensor.shape), tensor.stride())

    def _unpack(self, saved: Any) -> Tensor:  # Any: the same
        if not isinstance(saved, _Note):
            kept: Tensor = saved
            return kept
        with torch.no_grad(), self._streamer.looking_into(saved.pack) as memory:
            width = saved.dtype.itemsize
            rest = memory[saved.offset :]
            typed = rest[: rest.numel() // width * width].view(saved.dtype)
            return torch.as_strided(typed, saved.shape, saved.stride, typed.storage_offset()).data
