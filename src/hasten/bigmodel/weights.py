"""Where the weights of a model that stay on the disk lie: in a checkpoint's own files, or written once to a folder."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn

from hasten.bigmodel.offload_files import OffloadedWeightsLoader, read_offload_index
from hasten.bigmodel.ties import tensor_of
from hasten.checkpoint.export import replace_files_only
from hasten.checkpoint.format.formats import Piece, encode_safetensors, read_safetensors
from hasten.checkpoint.store.disk import Disk
from hasten.errors import PrepareError

_FILE = "offloaded-weights.safetensors"


class DiskWeights:
    """Pieces of files by the names of the model's tensors."""

    def __init__(self, pieces: Mapping[str, Piece] | None = None) -> None:
        self._pieces = dict(pieces or {})
        self.stays = False
        """All of it stays on the disk, whatever a map says."""

    def update(self, other: DiskWeights) -> None:
        """Add the pieces of another."""
        self._pieces.update(other._pieces)

    def piece(self, name: str) -> Piece | None:
        """Where a tensor lies in a file; None when it is in memory."""
        return self._pieces.get(name)

    @classmethod
    def find(
        cls,
        model: nn.Module,
        names: Iterable[str],
        folder: str | Path | None,
        index: Mapping[str, Mapping[str, Any]] | None,  # Any: entries of an index, of several kinds
    ) -> Self:
        """The pieces of the named tensors: from the index, else from the files in `folder`, else written there now.

        Raises: PrepareError when weights are to stay on the disk and there is no folder for them.
        """
        wanted = {name: tensor_of(model, name) for name in names}
        if not wanted:
            return cls()
        known = _known(folder, index)
        pieces, missing = {}, {}
        for name, tensor in wanted.items():
            piece = known.get(name)
            if piece is not None and _is_it(piece, tensor):
                pieces[name] = piece
            else:
                missing[name] = (tensor, piece)
        if missing:
            pieces.update(_write(missing, folder))
        return cls(pieces)


def _known(folder: str | Path | None, index: Mapping[str, Mapping[str, Any]] | None) -> dict[str, Piece]:
    found: dict[str, Piece] = {}
    if folder is not None and Path(folder).is_dir():
        for path in sorted(Path(folder).glob("*.safetensors")):
            content = read_safetensors(path)
            found.update(content.pieces)
            found.update({alias: content.pieces[name] for alias, name in content.aliases.items()})
    entries = index if index is not None else read_offload_index(folder) if folder is not None else {}
    loader = OffloadedWeightsLoader(save_folder=folder, index=entries)
    found.update({name: loader.piece(name) for name in entries})
    return found


def _is_it(piece: Piece, tensor: Tensor) -> bool:
    """Whether a piece is what the tensor is to be: tensors that hold numbers of their own are compared with it."""
    same = piece.data.dtype == tensor.dtype and piece.data.shape == tensor.shape
    return same and (tensor.is_meta or torch.equal(piece.data, tensor.detach().cpu()))


def _write(missing: Mapping[str, tuple[Tensor, Piece | None]], folder: str | Path | None) -> dict[str, Piece]:
    """Write tensors that no file has as they are needed; the pieces that were written."""
    if folder is None:
        raise PrepareError(
            f"{len(missing)} weights ({next(iter(missing))}, …) are to stay on the disk and lie in no file in the dtype "
            "they are used in. Give offload_dir (or offload_folder), where they can be written."
        )
    tensors: dict[str, Tensor] = {}
    for name, (tensor, piece) in missing.items():
        if tensor.is_meta and (piece is None or piece.data.shape != tensor.shape):
            continue  # whoever looks for tensors without numbers says so
        tensors[name] = piece.data.to(tensor.dtype) if tensor.is_meta and piece is not None else tensor.detach().cpu()
    if not tensors:
        return {}
    target = Path(folder)
    file, number = _FILE, 1
    while (target / file).exists():  # files of an earlier call may be in use
        number += 1
        file = _FILE.replace(".", f"-{number}.", 1)
    replace_files_only(target, {file: encode_safetensors(tensors)}, Disk())
    content = read_safetensors(target / file)
    return {**content.pieces, **{alias: content.pieces[name] for alias, name in content.aliases.items()}}
