"""Folders in the format of torch.distributed.checkpoint, read without running code.

Torch itself unpickles the folder's metadata and single objects in it; here anything but plain values and tensors is refused.
"""

from __future__ import annotations

import io
import math
import pickle
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import ReadItem

from hasten.checkpoint.format.formats import checked_shape
from hasten.checkpoint.format.manifest import (
    FORGED,
    MAX_TABLE_BYTES,
    open_outside,
    resolve_inside,
    size_of,
)
from hasten.errors import (
    CheckpointError,
    CorruptCheckpointError,
    HastenError,
    UnsafeCheckpointError,
)

TORCH_TABLE_NAME: Final = ".metadata"
# Any in this file: pickled values, and arguments of torch's methods.
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
    """Restricted unpickler for the metadata of a folder: torch's records, sizes and dtypes, no executable code."""

    def __init__(self, file: Any, table_path: Path) -> None:
        super().__init__(file)
        self._place = table_path

    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(
            getattr(torch, name, None), torch.dtype
        )
        if not is_dtype and (module, name) not in _ALLOWED:
            raise UnsafeCheckpointError(
                f"{self._place} asks for {module}.{name}, which could run code; it was not read. Only use folders that "
                "torch.distributed.checkpoint wrote."
            )
        return super().find_class(module, name)


class PlainReader(FileSystemReader):
    """Torch's reader with restricted unpickling of the metadata, which is checked against the files before any read."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        folder = Path(self.path)
        table_path = folder / TORCH_TABLE_NAME
        try:
            with open_outside(table_path, MAX_TABLE_BYTES) as table_file:
                table = _Table(table_file, table_path).load()
            check_table(table, folder)
        except FORGED as error:
            raise CorruptCheckpointError(
                f"{table_path} is damaged or was edited and cannot be read ({type(error).__name__}: {error}). Nothing was loaded; use another "
                "copy of the folder."
            ) from error
        if table.storage_meta is None:
            table.storage_meta = StorageMeta()
        table.storage_meta.load_id = self.load_id
        metadata: Metadata = table
        return metadata


def check_table(table: Any, folder: Path) -> None:
    """Raise unless the metadata describes tensors that the files in the folder can hold.

    Raises: UnsafeCheckpointError for files outside the folder, and for pipes; one of FORGED for everything else.
    """
    _expect_class(table, Metadata, "the table")
    _expect_class(table.storage_meta, StorageMeta | None, "storage_meta")
    _expect_class(table.state_dict_metadata, dict, "state_dict_metadata")
    _expect_class(table.storage_data, dict, "storage_data")
    _expect_class(table.planner_data, dict | None, "planner_data")
    file_sizes: dict[str, int] = {}
    for storage_index, storage_info in table.storage_data.items():
        _expect_class(storage_index, MetadataIndex, "a key of storage_data")
        _expect_class(
            storage_info.relative_path, str, f"the file of {storage_index.fqn}"
        )
        if storage_info.relative_path not in file_sizes:
            file_sizes[storage_info.relative_path] = size_of(
                resolve_inside(folder, storage_info.relative_path)
            )
        checked_shape((storage_info.offset, storage_info.length))
        if (
            storage_info.offset + storage_info.length
            > file_sizes[storage_info.relative_path]
        ):
            raise ValueError(
                f"{storage_index.fqn} ends after its file {storage_info.relative_path} of {file_sizes[storage_info.relative_path]} bytes"
            )
    for name, entry_metadata in table.state_dict_metadata.items():
        _expect_class(name, str, "a name")
        _expect_class(
            entry_metadata, TensorStorageMetadata | BytesStorageMetadata, name
        )
        if isinstance(entry_metadata, TensorStorageMetadata):
            _check_tensor(name, entry_metadata, table.storage_data)
        elif MetadataIndex(name) not in table.storage_data:
            raise ValueError(f"{name} is in no file")


def _check_tensor(
    name: str,
    tensor_metadata: TensorStorageMetadata,
    storage_places: Mapping[MetadataIndex, Any],
) -> None:
    _expect_class(
        tensor_metadata.properties, TensorProperties, f"the properties of {name}"
    )
    _expect_class(tensor_metadata.properties.dtype, torch.dtype, f"the dtype of {name}")
    _expect_class(tensor_metadata.chunks, list, f"the chunks of {name}")
    shape = checked_shape(tensor_metadata.size)
    num_filled = 0
    for chunk in tensor_metadata.chunks:
        _expect_class(chunk, ChunkStorageMetadata, f"a chunk of {name}")
        offset = checked_shape(chunk.offsets)
        extent = checked_shape(chunk.sizes)
        has_same_dims = len(offset) == len(extent) == len(shape)
        if not has_same_dims or any(
            chunk_start + chunk_length > dim_size
            for chunk_start, chunk_length, dim_size in zip(
                offset, extent, shape, strict=True
            )
        ):
            raise ValueError(
                f"a chunk of {list(extent)} at {list(offset)} does not fit into {name} of {list(shape)}"
            )
        chunk_place = storage_places[MetadataIndex(name, offset)]
        num_bytes = math.prod(extent) * tensor_metadata.properties.dtype.itemsize
        if num_bytes > chunk_place.length and not getattr(
            chunk_place, "transform_descriptors", None
        ):
            raise ValueError(
                f"{name} claims {num_bytes} bytes in {chunk_place.length} bytes of {chunk_place.relative_path}"
            )
        num_filled += math.prod(extent)
    if num_filled != math.prod(shape):
        raise ValueError(
            f"the chunks of {name} hold {num_filled} of its {math.prod(shape)} numbers"
        )


def _expect_class(table_value: Any, expected_class: Any, description: str) -> None:
    if not isinstance(table_value, expected_class):
        raise TypeError(f"{description} is a {type(table_value).__name__}")


class PlainPlanner(DefaultLoadPlanner):
    """Torch's load planner that refuses objects only pickle can read."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        try:
            torch.load(value, weights_only=True)
        except pickle.UnpicklingError as error:
            raise UnsafeCheckpointError(
                f"{read_item.dest_index.fqn} can only be read by running code from the checkpoint ({error}). Nothing was loaded. "
                "Only use folders that torch.distributed.checkpoint wrote."
            ) from error
        value.seek(0)
        super().load_bytes(read_item, value)


def is_torch_folder(folder: Path) -> bool:
    """Return True if torch.distributed.checkpoint wrote this folder."""
    return (folder / TORCH_TABLE_NAME).is_file()


def whole_tensors(folder: Path) -> dict[str, Tensor]:
    """Return every tensor of a folder by name, unsharded. Ranks: any one process."""
    reader = PlainReader(folder)
    table = reader.read_metadata().state_dict_metadata
    tensor_table = {}
    for name, tensor_metadata in table.items():
        if isinstance(tensor_metadata, TensorStorageMetadata):
            tensor_table[name] = tensor_metadata
    try:
        empty_tensors = {}
        for name, tensor_metadata in tensor_table.items():
            empty_tensors[name] = torch.empty(
                tensor_metadata.size, dtype=tensor_metadata.properties.dtype
            )
    except (RuntimeError, MemoryError) as error:
        raise CheckpointError(
            f"{folder}: its {len(tensor_table)} tensors do not fit into the memory of this machine ({error}). Nothing was loaded. Merge it on a "
            "machine with more memory."
        ) from error
    _load_folder(empty_tensors, reader, no_dist=True)
    return empty_tensors


def fill_state(state: Mapping[str, Any], folder: Path) -> None:
    """Read a folder into tensors and values of the same names, each rank its shards. Ranks: every rank."""
    _load_folder(state, PlainReader(folder), no_dist=False)


def _load_folder(state: Mapping[str, Any], reader: PlainReader, no_dist: bool) -> None:
    try:
        with warnings.catch_warnings():
            # a single process is intended
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            dcp.load(
                dict(state),
                storage_reader=reader,
                planner=PlainPlanner(),
                no_dist=no_dist,
            )
    # torch's error, with the exceptions raised on each rank
    except CheckpointException as error:
        causes_by_rank = {rank: cause for rank, (cause, _) in error.failures.items()}
        own_error = next(
            (
                cause
                for cause in causes_by_rank.values()
                if isinstance(cause, HastenError)
            ),
            None,
        )
        if own_error is not None:
            raise own_error from error
        cause_texts = []
        for rank, cause in causes_by_rank.items():
            cause_texts.append(f"rank {rank}: {type(cause).__name__}: {cause}")
        causes_text = "; ".join(cause_texts)
        raise CorruptCheckpointError(
            f"{reader.path}: the files do not hold what their table says ({causes_text}). The tensors may be filled in part; use another "
            "copy of the folder."
        ) from error


def names_in(folder: Path) -> set[str]:
    """Return the names of all entries in a folder."""
    return set(PlainReader(folder).read_metadata().state_dict_metadata)
