"""Folders in the format of torch.distributed.checkpoint, read without running code.

Torch itself unpickles the folder's table and single objects in it; here anything but plain values and tensors is refused.
"""

from __future__ import annotations

import io
import pickle
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem

from hasten.errors import CheckpointError, UnsafeCheckpointError

# Any in this file: pickled values, and torch's own arguments.
_RECORDS: Final = (
    "Metadata TensorStorageMetadata BytesStorageMetadata ChunkStorageMetadata TensorProperties MetadataIndex StorageMeta "
    "_MEM_FORMAT_ENCODING"
)
_ALLOWED: Final = frozenset(
    {
        *(("torch.distributed.checkpoint.metadata", name) for name in _RECORDS.split()),
        ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
        ("torch.serialization", "_get_layout"),
        ("torch", "Size"),
        ("pathlib", "PosixPath"),
        ("pathlib", "PurePosixPath"),
    }
)


class _Table(pickle.Unpickler):
    """Reads the table of a folder: torch's own records, sizes and dtypes, nothing that could run."""

    def __init__(self, file: Any, place: Path) -> None:
        super().__init__(file)
        self._place = place

    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if not is_dtype and (module, name) not in _ALLOWED:
            raise UnsafeCheckpointError(
                f"{self._place} asks for {module}.{name}, which could run code; it was not read. Only use folders that "
                "torch.distributed.checkpoint wrote."
            )
        return super().find_class(module, name)


class PlainReader(FileSystemReader):
    """Torch's reader with a table that cannot run code."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        file = Path(self.path) / ".metadata"
        try:
            with file.open("rb") as stream:
                table: Metadata = _Table(stream, file).load()
        except (OSError, pickle.UnpicklingError, EOFError, AttributeError, ImportError, IndexError, TypeError) as error:
            raise CheckpointError(f"{file} is damaged and cannot be read ({error}). Nothing was loaded.") from error
        assert table.storage_meta is not None, "torch writes it with every folder"
        table.storage_meta.load_id = self.load_id
        return table


class PlainPlanner(DefaultLoadPlanner):
    """Torch's planner, which lets no object through that only pickle can read."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        try:
            torch.load(value, weights_only=True)
        except pickle.UnpicklingError as error:
            raise UnsafeCheckpointError(
                f"{read_item.dest_index.fqn} can only be read by running code from the checkpoint ({error}). Nothing was loaded."
            ) from error
        value.seek(0)
        super().load_bytes(read_item, value)


def is_torch_folder(folder: Path) -> bool:
    """Whether torch.distributed.checkpoint wrote this folder."""
    return (folder / ".metadata").is_file()


def whole_tensors(folder: Path) -> dict[str, Tensor]:
    """Every tensor of a folder, whole, by its name. Ranks: any one process."""
    reader = PlainReader(folder)
    table = reader.read_metadata().state_dict_metadata
    state = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in table.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # one process is what is meant
        dcp.load(dict(state), storage_reader=reader, planner=PlainPlanner(), no_dist=True)
    return state


def fill(state: Mapping[str, Any], folder: Path) -> None:
    """Read a folder into tensors and values of the same names, each rank what it holds. Ranks: every rank."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # alone, there is nothing to share
        dcp.load(dict(state), storage_reader=PlainReader(folder), planner=PlainPlanner())


def names_in(folder: Path) -> set[str]:
    """The names of everything in a folder."""
    return set(PlainReader(folder).read_metadata().state_dict_metadata)
