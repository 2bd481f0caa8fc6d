"""Where the tensors lie in a torch file, written beside it: hasten reads its own files back without a pickle."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import msgspec
from torch import Tensor

from hasten.checkpoint.base import Blob, Json, Slice, local_data
from hasten.checkpoint.format.formats import DTYPE_NAMES, DTYPES, MappedFile, Piece, TensorFile, dims, lay_out_torch
from hasten.checkpoint.store.outside_files import FORGED, read_outside, size_of
from hasten.errors import CorruptCheckpointError

SUFFIX: Final = ".layout.json"
WORTH_IT: Final = 64
"""Tensors in a file from which on unpickling it takes longer than reading one more."""


class Sidecar(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The content of a torch file but for the bytes of its tensors."""

    size: int
    """Of the torch file: a sidecar belongs to one file only."""
    tensors: dict[str, tuple[str, tuple[int, ...], int]]
    """dtype, shape and first byte, by name."""
    data: Any  # Any: JSON


def encode_with_sidecar(tensors: Mapping[str, Tensor | Slice], data: Json) -> tuple[Blob, Blob | None]:
    """A torch file, and its sidecar where that is worth a file."""
    blob, begins = lay_out_torch(tensors, data)
    kinds = {key: local_data(tensor) for key, tensor in tensors.items()}
    if len(tensors) < WORTH_IT or any(tensor.dtype not in DTYPE_NAMES for tensor in kinds.values()):
        return blob, None
    places = {key: (DTYPE_NAMES[kinds[key].dtype], tuple(kinds[key].shape), begins[key]) for key in tensors}
    raw = msgspec.json.encode(Sidecar(blob.size, places, data))
    return blob, Blob([raw], len(raw))


def read_by_sidecar(path: Path, sidecar: Path) -> TensorFile:
    """Map a torch file into memory as its sidecar says; nothing of it is interpreted.

    Raises: CorruptCheckpointError naming the sidecar and what is wrong.
    """
    try:
        found = msgspec.json.decode(read_outside(sidecar), type=Sidecar)
        size = size_of(path)
        if size != found.size:
            raise ValueError(f"it describes a file of {found.size} bytes, {path.name} has {size}")
        file = MappedFile(path, size)
        return TensorFile({key: _piece(file, key, *entry) for key, entry in found.tensors.items()}, {}, found.data)
    except (msgspec.MsgspecError, *FORGED) as error:
        raise CorruptCheckpointError(
            f"{sidecar}: does not describe {path.name} ({type(error).__name__}: {error}). Nothing was loaded; use "
            "another checkpoint."
        ) from error


def _piece(file: MappedFile, key: str, name: str, shape: tuple[int, ...], start: int) -> Piece:
    raw, dtype, shape = file.data, DTYPES[name], dims(shape)
    end = start + math.prod(shape) * dtype.itemsize
    if start < 0 or end > raw.numel():
        raise ValueError(f"{key!r} of shape {list(shape)} claims bytes {start}..{end} of {raw.numel()}")
    part = raw[start:end]
    if start % dtype.itemsize:  # as it is written, every tensor is aligned
        part = part.clone()
    return Piece(part.view(dtype).reshape(shape), shape, (0,) * len(shape), file)
