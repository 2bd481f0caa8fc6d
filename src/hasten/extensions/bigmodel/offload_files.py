"""Offloaded weights in a folder of plain files with an index, in the format that Accelerate established."""

from __future__ import annotations

import json
import math
import os
import secrets
from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hasten.checkpoint.export import replace_files_only
from hasten.checkpoint.format.formats import (
    MappedFile,
    Piece,
    checked_shape,
    encode_safetensors,
    read_safetensors,
)
from hasten.checkpoint.format.manifest import (
    FORGED,
    read_outside,
    resolve_inside,
    size_of,
)
from hasten.checkpoint.store.disk import Disk, as_bytes
from hasten.errors import CheckpointError, CorruptCheckpointError, PrepareError
from hasten.extensions.bigmodel.device_map import tensor_of

INDEX_NAME = "index.json"
# "dtype" and "shape", or "safetensors_file" and "weight_name"
WeightInfo = Mapping[str, Any]


def offload_weight(
    weight: Tensor,
    weight_name: str,
    offload_folder: str | Path,
    index: MutableMapping[str, Any] | None = None,
) -> MutableMapping[str, Any] | None:
    """Write the bytes of one weight to `offload_folder`; returns the index with its entry, if one was given."""
    folder = Path(offload_folder)
    folder.mkdir(parents=True, exist_ok=True)
    hidden_path = folder / f".hasten-{secrets.token_hex(6)}"
    try:
        with hidden_path.open("wb") as file:
            tensor = weight.detach().cpu().contiguous()
            if tensor.numel():
                file.write(as_bytes(tensor).numpy().data)
            file.flush()
            os.fsync(file.fileno())
        hidden_path.rename(folder / f"{weight_name}.dat")
    finally:
        hidden_path.unlink(missing_ok=True)
    if index is not None:
        index[weight_name] = {
            "dtype": str(weight.dtype).removeprefix("torch."),
            "shape": list(weight.shape),
        }
    return index


def save_offload_index(index: Mapping[str, Any], offload_folder: str | Path) -> None:
    """Add the entries to the folder's index, which is replaced atomically; without entries nothing is written."""
    if not index:
        return
    folder = Path(offload_folder)
    stored_index = read_offload_index(folder)
    hidden_path = folder / f".hasten-{secrets.token_hex(6)}"
    hidden_path.write_text(json.dumps({**stored_index, **index}, indent=2), "utf-8")
    hidden_path.rename(folder / INDEX_NAME)


def read_offload_index(folder: str | Path) -> dict[str, Any]:
    """Return the entries of a folder's index; empty if it has none."""
    path = Path(folder) / INDEX_NAME
    if not path.is_file():
        return {}
    try:
        stored_index = json.loads(read_outside(path))
        return {str(name): {**entry} for name, entry in stored_index.items()}
    except FORGED as error:
        raise CorruptCheckpointError(
            f"{path}: not an index of offloaded weights ({type(error).__name__}: {error}). Nothing was loaded; offload the weights again."
        ) from error


def offload_state_dict(save_dir: str | Path, state_dict: Mapping[str, Tensor]) -> None:
    """Write the weights of a state dict to a folder, one file each, with an index."""
    Path(save_dir).mkdir(parents=True, exist_ok=True)
    index: dict[str, Any] = {}
    for name, weight in state_dict.items():
        offload_weight(weight, name, save_dir, index)
    save_offload_index(index, save_dir)


def mapped_weight(path: Path, weight_info: WeightInfo) -> Piece:
    """Return a weight as a memory-mapped piece of its file."""
    dtype = getattr(torch, str(weight_info.get("dtype")).removeprefix("torch."), None)
    try:
        shape = checked_shape(weight_info.get("shape"))
        file_bytes = size_of(path)
    except FORGED as error:
        raise CheckpointError(
            f"{path}: no file of an offloaded weight of shape {weight_info.get('shape')!r:.80} ({type(error).__name__}: {error}). Nothing was "
            "loaded; offload the weights again."
        ) from error
    if not isinstance(dtype, torch.dtype):
        raise CheckpointError(
            f"{path}: no file of an offloaded weight of dtype {weight_info.get('dtype')!r:.80}, which torch does not have. Nothing was loaded; "
            "offload the weights again."
        )
    needed_bytes = math.prod(shape) * dtype.itemsize
    if file_bytes < needed_bytes:
        raise CorruptCheckpointError(
            f"{path} has {file_bytes} bytes, and {needed_bytes} are needed for {shape}. Nothing was loaded; offload the weights again."
        )
    if not needed_bytes:
        return Piece(torch.empty(shape, dtype=dtype), shape, (0,) * len(shape))
    mapped_file = MappedFile(path, file_bytes)
    return Piece(
        mapped_file.data[:needed_bytes].view(dtype).reshape(shape),
        shape,
        (0,) * len(shape),
        mapped_file,
    )


def load_offloaded_weight(weight_file: str | Path, weight_info: WeightInfo) -> Tensor:
    """Return a weight as a tensor that is memory-mapped from its file."""
    return mapped_weight(Path(weight_file), weight_info).data


class OffloadedWeightsLoader(Mapping[str, Tensor]):
    """Mapping of weights by name, from a state dict in memory and from a folder or index of offloaded ones."""

    def __init__(
        self,
        state_dict: Mapping[str, Tensor] | None = None,
        save_folder: str | Path | None = None,
        index: Mapping[str, WeightInfo] | None = None,
        device: torch.device | str | int | None = None,
    ) -> None:
        if state_dict is None and save_folder is None and index is None:
            raise ValueError(
                "Need either a `state_dict`, a `save_folder` or an `index` containing offloaded weights."
            )
        self.state_dict = {} if state_dict is None else state_dict
        self.save_folder = save_folder
        self.index = dict(
            index if index is not None else read_offload_index(save_folder or ".")
        )
        self.device = device
        self.all_keys = [
            *self.state_dict,
            *(key for key in self.index if key not in self.state_dict),
        ]
        self._files: dict[str, Mapping[str, Piece]] = {}

    def piece(self, key: str) -> Piece:
        """Return the memory-mapped piece of an offloaded weight."""
        weight_info = self.index[key]
        if (file_name := weight_info.get("safetensors_file")) is not None:
            if file_name not in self._files:
                self._files[file_name] = read_safetensors(Path(file_name)).pieces
            return self._files[file_name][weight_info.get("weight_name", key)]
        return mapped_weight(
            resolve_inside(Path(self.save_folder or "."), f"{key}.dat"), weight_info
        )

    def __getitem__(self, key: str) -> Tensor:
        if key in self.state_dict:
            return self.state_dict[key]
        stored_tensor = self.piece(key).data
        weight_info = self.index[key]
        if "safetensors_file" in weight_info and "dtype" in weight_info:
            stored_tensor = stored_tensor.to(
                getattr(torch, str(weight_info["dtype"]).removeprefix("torch."))
            )
        return stored_tensor if self.device is None else stored_tensor.to(self.device)

    def __iter__(self) -> Iterator[str]:
        return iter(self.all_keys)

    def __len__(self) -> int:
        return len(self.all_keys)


_FILE = "offloaded-weights.safetensors"


def find_disk_weights(
    model: nn.Module,
    names: Iterable[str],
    folder: str | Path | None,
    # Any: entries of an index, of several kinds
    index: Mapping[str, Mapping[str, Any]] | None,
) -> dict[str, Piece]:
    """Return the pieces of the named tensors in the index or in the files of `folder`; write those that are missing.

    Raises: PrepareError if weights must be written and there is no folder.
    """
    tensors = {name: tensor_of(model, name) for name in names}
    if not tensors:
        return {}
    stored_pieces = _read_folder_pieces(folder, index)
    file_pieces = {}
    missing_tensors = {}
    for name, tensor in tensors.items():
        file_piece = stored_pieces.get(name)
        if file_piece is not None and _piece_matches(file_piece, tensor):
            file_pieces[name] = file_piece
        else:
            missing_tensors[name] = (tensor, file_piece)
    if missing_tensors:
        file_pieces.update(_write_missing(missing_tensors, folder))
    return file_pieces


def _read_folder_pieces(
    folder: str | Path | None, index: Mapping[str, Mapping[str, Any]] | None
) -> dict[str, Piece]:
    file_pieces: dict[str, Piece] = {}
    if folder is not None and Path(folder).is_dir():
        for path in sorted(Path(folder).glob("*.safetensors")):
            file_content = read_safetensors(path)
            file_pieces.update(file_content.pieces)
            file_pieces.update(
                {
                    alias_name: file_content.pieces[name]
                    for alias_name, name in file_content.aliases.items()
                }
            )
    index_entries = index or {}
    if index is None and folder is not None:
        index_entries = read_offload_index(folder)
    weights_loader = OffloadedWeightsLoader(save_folder=folder, index=index_entries)
    file_pieces.update({name: weights_loader.piece(name) for name in index_entries})
    return file_pieces


def _piece_matches(file_piece: Piece, tensor: Tensor) -> bool:
    """Return whether a piece matches the tensor in dtype, shape and, unless it is a meta tensor, values."""
    has_same_layout = (
        file_piece.data.dtype == tensor.dtype and file_piece.data.shape == tensor.shape
    )
    return has_same_layout and (
        tensor.is_meta or torch.equal(file_piece.data, tensor.detach().cpu())
    )


def _write_missing(
    missing: Mapping[str, tuple[Tensor, Piece | None]], folder: str | Path | None
) -> dict[str, Piece]:
    """Write tensors that no file holds in the needed dtype; returns the written pieces."""
    if folder is None:
        raise PrepareError(
            f"{len(missing)} weights ({next(iter(missing))}, …) are placed on disk, but no file contains them in their dtype. Pass "
            "offload_dir (or offload_folder), so that they can be written."
        )
    written_tensors: dict[str, Tensor] = {}
    for name, (tensor, file_piece) in missing.items():
        if tensor.is_meta and (
            file_piece is None or file_piece.data.shape != tensor.shape
        ):
            continue  # tensors without values are reported by the caller
        if tensor.is_meta and file_piece is not None:
            written_tensor = file_piece.data.to(tensor.dtype)
        else:
            written_tensor = tensor.detach().cpu()
        written_tensors[name] = written_tensor
    if not written_tensors:
        return {}
    target_folder = Path(folder)
    file_name = _FILE
    file_number = 1
    while (
        target_folder / file_name
    ).exists():  # files of an earlier call may be in use
        file_number += 1
        file_name = _FILE.replace(".", f"-{file_number}.", 1)
    replace_files_only(
        target_folder, {file_name: encode_safetensors(written_tensors)}, Disk()
    )
    file_content = read_safetensors(target_folder / file_name)
    return {
        **file_content.pieces,
        **{
            alias_name: file_content.pieces[name]
            for alias_name, name in file_content.aliases.items()
        },
    }
