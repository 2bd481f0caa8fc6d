"""File formats: tensors as safetensors or torch files, both written as segments and read by memory-mapping."""

from __future__ import annotations

import json
import math
import os
import pickle
import struct
import warnings
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from io import RawIOBase
from operator import itemgetter
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.serialization import skip_data

from hasten.checkpoint.base import Blob, Json, Slice
from hasten.checkpoint.format.manifest import (
    FORGED,
    open_outside,
    size_of,
)
from hasten.checkpoint.format.packing import from_native, to_native
from hasten.errors import CheckpointError, CorruptCheckpointError, UnsafeCheckpointError
from hasten.modules.names import is_dtensor, local_tensor
from hasten.optional import need
from hasten.runtime.devices import kind_of

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

_METADATA = "__metadata__"
_METADATA_KEY = "hasten"
_ZIP: Final = b"PK\x03\x04"
_NAME_LENGTH_OFFSET: Final = 26
"""Bytes before the lengths of name and extra field in the header of an archived file."""
_MAX_HEADER_BYTES = 100_000_000  # the limit set by the safetensors format
DTYPES: Final = MappingProxyType(
    {
        "BOOL": torch.bool,
        "U8": torch.uint8,
        "I8": torch.int8,
        "U16": torch.uint16,
        "I16": torch.int16,
        "F16": torch.float16,
        "BF16": torch.bfloat16,
        "U32": torch.uint32,
        "I32": torch.int32,
        "F32": torch.float32,
        "U64": torch.uint64,
        "I64": torch.int64,
        "F64": torch.float64,
        "C64": torch.complex64,
        "F8_E4M3": torch.float8_e4m3fn,
        "F8_E5M2": torch.float8_e5m2,
        "F8_E8M0": torch.float8_e8m0fnu,
    }
)
DTYPE_NAMES: Final = MappingProxyType({dtype: name for name, dtype in DTYPES.items()})


class MappedFile:
    """A memory-mapped file, readable also after it was deleted."""

    def __init__(self, path: Path, size: int, address: int | None = None) -> None:
        """Map a file, unless the `address` of a mapping of it is given."""
        self.path = path
        self.size = size
        file_status = path.stat()
        self._identity = file_status.st_dev, file_status.st_ino
        self.data = torch.empty(0, dtype=torch.uint8)
        if address is None:
            # Any: the stubs name another base
            storage: Any = torch.UntypedStorage.from_file(str(path), False, size)
            self.data = self.data.set_(storage)
            address = self.data.data_ptr()
        self.address = address

    def open_again(self) -> int | None:
        """Return a descriptor of the same file; None when the file is no longer there under its name."""
        try:
            fd = os.open(self.path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
        except OSError:  # the mapping stays valid, and reports a broken disk itself
            return None
        file_status = os.fstat(fd)
        if (file_status.st_dev, file_status.st_ino) == self._identity:
            return fd
        os.close(fd)
        return None


@dataclass(frozen=True, slots=True)
class Piece:
    """A tensor found in a file: the mapped bytes, and their position in the global tensor."""

    data: Tensor
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    file: MappedFile | None = None


@dataclass(frozen=True, slots=True)
class TensorFile:
    """The content of one file: pieces by key, other names of the same tensors, and JSON."""

    pieces: Mapping[str, Piece]
    aliases: Mapping[str, str] = field(default_factory=dict)
    data: Json = None


def as_stored(tensor: Tensor) -> Tensor | Slice:
    """Return a tensor in the form that checkpoints store: distributed tensors become slices, others are unchanged."""
    # the engine stores the weights elsewhere
    if (stored_slice := getattr(tensor, "stored_slice", None)) is not None:
        engine_slice: Slice = stored_slice(tensor)
        return engine_slice
    if is_dtensor(tensor):
        return dtensor_slice(tensor)
    return tensor.detach()


def dtensor_slice(tensor: DTensor) -> Slice:
    """Return the slice of a distributed tensor that this rank holds, with the flag whether this rank writes it.

    Raises: CheckpointError for tensors with partial placements.
    """
    mesh = tensor.device_mesh
    placements = tensor.placements
    if any(placement.is_partial() for placement in placements):
        raise CheckpointError(
            f"a tensor with placements {placements} holds partial sums, which are not a state that can be saved; reduce it before saving "
            "(call redistribute with Replicate or Shard)."
        )
    local_shard: Tensor = tensor.to_local()
    # already imported wherever a DTensor exists
    layout_module = need("torch.distributed.tensor._utils")
    local_shape, global_offset = layout_module.compute_local_shape_and_global_offset(
        tensor.shape, mesh, placements
    )
    assert tuple(local_shape) == tuple(local_shard.shape), (
        f"local shape {tuple(local_shard.shape)}, but the layout says {tuple(local_shape)}"
    )
    mesh_coordinate = mesh.get_coordinate()
    assert mesh_coordinate is not None, "this rank holds no part of the tensor's mesh"
    is_first = all(
        axis_index == 0
        for axis_index, p in zip(mesh_coordinate, placements, strict=True)
        if p.is_replicate()
    )
    # an empty shard at the end of an uneven split has no offset
    if local_shard.numel() == 0:
        global_offset = tuple(
            min(start, dim_size)
            for start, dim_size in zip(global_offset, tensor.shape, strict=True)
        )
        is_first = False
    is_owned = is_first and _is_first_on_other_axes(mesh)
    return Slice(
        local_shard.detach(),
        tuple(tensor.shape),
        tuple(global_offset),
        is_owned,
        tuple(mesh.mesh_dim_names or ()),
        is_first,
    )


def _is_first_on_other_axes(mesh: DeviceMesh) -> bool:
    """Return True if this rank is the first of those that hold the same tensor on separate submeshes.

    Where layers are split over `tp`, the other parameters are sharded over the data-parallel axes of each `tp` rank
    identically. Pipeline stages (`pp`) hold different parameters.
    """
    root_mesh = mesh._get_root_mesh()
    root_coordinate = root_mesh.get_coordinate()
    root_axes = root_mesh.mesh_dim_names
    mesh_axes = mesh.mesh_dim_names
    if root_coordinate is None or root_axes is None or mesh_axes is None:
        return True
    return all(
        axis_index == 0
        for axis_index, axis in zip(root_coordinate, root_axes, strict=True)
        if axis not in (*mesh_axes, "pp")
    )


def make_dense(tensor: Tensor, tensor_name: str) -> Tensor:
    """Return the tensor as contiguous plain memory, copied only if it has another layout.

    Raises: CheckpointError for tensors without plain memory.
    """
    tensor = tensor.detach()
    if (
        tensor.layout is not torch.strided
        or tensor.is_quantized
        or tensor.device.type == "meta"
    ):
        raise CheckpointError(
            f"{tensor_name} is a {tensor.layout} tensor on {tensor.device}, which has no plain bytes to store. Convert it to a "
            "dense tensor (or materialise it) before saving."
        )
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    if tensor.device.type != "cpu" and kind_of(tensor.device).lazy:
        tensor = tensor.cpu()
    return tensor if tensor.is_contiguous() else tensor.contiguous()


def find_tied_names(tensors: Mapping[str, Tensor | Slice]) -> dict[str, str]:
    """Return the other names of tensors that share memory: alias -> the first name of the tensor.

    Of sharded tensors this rank's parts are compared; tensors without an address of their own are never aliases.
    """
    first_names: dict[tuple[Any, ...], str] = {}
    aliases = {}
    for tensor_name, tensor in tensors.items():
        if isinstance(tensor, Slice):
            local_data = tensor.data
        elif type(tensor) is Tensor:
            local_data = tensor
        else:
            local_data = local_tensor(tensor)
        if (
            local_data.numel() == 0
            or local_data.layout is not torch.strided
            or local_data.device.type == "meta"
        ):
            continue
        # no addresses: tied tensors are written twice
        if local_data.device.type != "cpu" and kind_of(local_data.device).lazy:
            continue
        if not local_data.data_ptr():  # a subclass that wraps other tensors
            continue
        memory_key = (
            local_data.device,
            local_data.data_ptr(),
            local_data.dtype,
            tensor.shape,
            local_data.shape,
            local_data.stride(),
        )
        if (
            first_name := first_names.setdefault(memory_key, tensor_name)
        ) != tensor_name:
            aliases[tensor_name] = first_name
    return aliases


def encode_safetensors(
    tensors: Mapping[str, Tensor | Slice],
    data: Json = None,
    metadata: Mapping[str, str] | None = None,
) -> Blob:
    """Return one safetensors file: every tensor once (tied names are recorded), `data` in its metadata."""
    aliases = find_tied_names(tensors)
    ordered_tensors: list[tuple[int, str, Tensor]] = []
    slice_positions: dict[str, list[list[int]]] = {}
    for tensor_name, stored_tensor in tensors.items():
        if tensor_name in aliases:
            continue
        if isinstance(stored_tensor, Slice):
            slice_positions[tensor_name], stored_tensor = (
                [list(stored_tensor.shape), list(stored_tensor.offset)],
                stored_tensor.data,
            )
        dense_tensor = make_dense(stored_tensor, tensor_name)
        if dense_tensor.dtype not in DTYPE_NAMES:
            raise CheckpointError(
                f"{tensor_name} has dtype {dense_tensor.dtype}, which safetensors cannot hold. Convert it, or save with "
                "safe_serialization=False."
            )
        ordered_tensors.append(
            (-dense_tensor.element_size(), tensor_name, dense_tensor)
        )
    # Sorting by element size keeps every tensor aligned without padding, which the format forbids.
    ordered_tensors.sort(key=itemgetter(0, 1))
    own_metadata: dict[str, Any] = {"aliases": aliases} if aliases else {}
    if data is not None:
        own_metadata["data"] = data
    if slice_positions:
        own_metadata["slices"] = slice_positions
    header: dict[str, Any] = {_METADATA: {"format": "pt", **(metadata or {})}}
    if own_metadata:
        header[_METADATA][_METADATA_KEY] = json.dumps(
            own_metadata, allow_nan=False, separators=(",", ":")
        )
    segments: list[bytes | Tensor] = []
    offset = 0
    for _, tensor_name, dense_tensor in ordered_tensors:
        tensor_bytes = dense_tensor.numel() * dense_tensor.element_size()
        header[tensor_name] = {
            "dtype": DTYPE_NAMES[dense_tensor.dtype],
            "shape": list(dense_tensor.shape),
            "data_offsets": [offset, offset + tensor_bytes],
        }
        offset += tensor_bytes
        if tensor_bytes:
            segments.append(dense_tensor)
    header_bytes = json.dumps(header, separators=(",", ":")).encode()
    header_bytes += b" " * (-len(header_bytes) % 8)
    file_head = len(header_bytes).to_bytes(8, "little") + header_bytes
    return Blob([file_head, *segments], len(file_head) + offset)


def read_safetensors(path: Path) -> TensorFile:
    """Map a safetensors file into memory; only the header is read.

    Raises: CorruptCheckpointError naming the file and the problem.
    """
    try:
        file_size = size_of(path)
        with open_outside(path) as header_file:
            header_length = int.from_bytes(header_file.read(8), "little")
            if file_size < 8 or not 2 <= header_length <= min(
                _MAX_HEADER_BYTES, file_size - 8
            ):
                raise ValueError(
                    f"header length {header_length} in a file of {file_size} bytes"
                )
            header = json.loads(header_file.read(header_length))
        own_metadata = json.loads(header.pop(_METADATA, {}).get(_METADATA_KEY, "{}"))
        mapped_file = MappedFile(path, file_size)
        slice_positions = own_metadata.get("slices", {})
        data_start = reached_offset = 8 + header_length
        tensor_offsets = []
        for tensor_name, tensor_entry in header.items():
            start_offset, end_offset = tensor_entry["data_offsets"]
            tensor_offsets.append((int(start_offset), int(end_offset), tensor_name))
        pieces = {}
        for start_offset, end_offset, tensor_name in sorted(tensor_offsets):
            if data_start + start_offset != reached_offset:
                raise ValueError(
                    f"{tensor_name!r} begins at byte {data_start + start_offset} instead of {reached_offset}"
                )
            pieces[tensor_name] = _map_piece(
                mapped_file,
                tensor_name,
                header[tensor_name]["dtype"],
                header[tensor_name]["shape"],
                data_start + start_offset,
                slice_positions.get(tensor_name),
            )
            reached_offset = data_start + end_offset
            tensor = pieces[tensor_name].data
            if end_offset - start_offset != tensor.numel() * tensor.element_size():
                raise ValueError(
                    f"{tensor_name!r} of shape {list(tensor.shape)} has {end_offset - start_offset} bytes"
                )
        if reached_offset != file_size:
            raise ValueError(
                f"{file_size - reached_offset} bytes after the last tensor"
            )
        aliases = {}
        for alias, first_name in own_metadata.get("aliases", {}).items():
            if first_name not in pieces or alias in pieces:
                raise ValueError(
                    f"alias {alias!r} of {first_name!r}, which is not in the file"
                )
            aliases[str(alias)] = str(first_name)
        return TensorFile(pieces, aliases, own_metadata.get("data"))
    except FORGED as error:
        raise CorruptCheckpointError(
            f"{path}: not a valid safetensors file ({type(error).__name__}: {_shorten(error)}). Nothing was loaded; use another "
            "checkpoint."
        ) from error


def _map_piece(
    mapped_file: MappedFile,
    tensor_name: str,
    dtype_name: str,
    dims: Any,
    start_offset: int,
    position: tuple[Any, Any] | None = None,
) -> Piece:
    """Return a tensor of a mapped file; `position` is the shape of the global tensor and the offset in it."""
    dtype = DTYPES[dtype_name]
    shape = checked_shape(dims)
    end_offset = start_offset + math.prod(shape) * dtype.itemsize
    if start_offset < 0 or end_offset > mapped_file.data.numel():
        raise ValueError(
            f"{tensor_name!r} of shape {list(shape)} claims bytes {start_offset}..{end_offset} of {mapped_file.data.numel()}"
        )
    tensor_bytes = mapped_file.data[start_offset:end_offset]
    if start_offset % dtype.itemsize:  # other tools may write unaligned tensors
        tensor_bytes = tensor_bytes.clone()
    local_data = tensor_bytes.view(dtype).reshape(shape)
    if position is None:
        return Piece(local_data, shape, (0,) * len(shape), mapped_file)
    piece = Piece(
        local_data, checked_shape(position[0]), checked_shape(position[1]), mapped_file
    )
    check_piece(tensor_name, piece)
    return piece


def checked_shape(stored_shape: Any) -> tuple[int, ...]:
    """Return the shape stored in a file. Raises: ValueError if it is not a shape."""
    shape = tuple(stored_shape)
    if shape and (
        {*map(type, shape)} != {int} or min(shape) < 0 or max(shape) >= 2**62
    ):
        raise ValueError(f"{stored_shape!r} is not a shape")
    return shape


def check_piece(tensor_name: str, piece: Piece) -> None:
    """Raise ValueError unless the piece fits inside its tensor."""
    local_shape = piece.data.shape
    fits = len(piece.shape) == len(piece.offset) == len(local_shape) and all(
        start + length <= dim_size
        for start, length, dim_size in zip(
            piece.offset, local_shape, piece.shape, strict=True
        )
    )
    if not fits:
        raise ValueError(
            f"piece {tensor_name!r} of {list(local_shape)} at {piece.offset} does not fit into {piece.shape}"
        )


def encode_torch(tensors: Mapping[str, Tensor | Slice], data: Json = None) -> Blob:
    """Return one torch file as `torch.save` writes it, with the state in its original nesting.

    `torch.save` lays the file out with the tensor bytes left blank; the tensors follow as segments, so that they
    can be written in parallel and copied from a device piece by piece.
    """
    owned_tensors: dict[int, Tensor] = {}
    """Tensors by the id of their blank."""
    blanks: dict[str, Tensor | Slice] = {}
    aliases = find_tied_names(tensors)
    for tensor_name, stored_tensor in tensors.items():
        if isinstance(stored_tensor, Slice):
            raise CheckpointError(
                f"{tensor_name} is a slice of a sharded tensor; torch files hold whole tensors only."
            )
        if (first_name := aliases.get(tensor_name)) is not None:
            blanks[tensor_name] = blanks[first_name]
            continue
        dense_tensor = make_dense(stored_tensor, tensor_name)
        blanks[tensor_name] = blank = torch.empty(
            dense_tensor.shape, dtype=dense_tensor.dtype
        )
        owned_tensors[id(blank)] = dense_tensor
    nested_state: Any = blanks if data is None else to_native(data, blanks)
    # Any: it implements the methods of a file that torch.save calls
    archive: Any = _BlankArchive()
    with skip_data():
        torch.save(nested_state, archive)
    storage_ids: dict[int, None] = {}
    _find_storages(nested_state, storage_ids)
    stored_tensors = []
    for blank_id in storage_ids:
        if owned_tensors[blank_id].numel():
            stored_tensors.append(owned_tensors[blank_id])
    stored_tensors.reverse()
    segments: list[bytes | Tensor] = []
    for archive_part in archive.parts:
        if isinstance(archive_part, bytearray):
            segments.append(bytes(archive_part))
            continue
        tensor = stored_tensors.pop()
        assert archive_part == tensor.nbytes, (
            f"torch left {archive_part} bytes for a tensor of {tensor.nbytes}"
        )
        segments.append(tensor)
    assert not stored_tensors, "torch left space for every tensor"
    return Blob(segments, archive.size)


def _find_storages(nested_state: Any, storage_ids: dict[int, None]) -> None:
    """Add the ids of the tensors of a nested value in the order in which pickle meets their storages."""
    if isinstance(nested_state, Tensor):
        storage_ids.setdefault(id(nested_state))
    elif isinstance(nested_state, dict):
        for state_key, inner_state in nested_state.items():
            _find_storages(state_key, storage_ids)
            _find_storages(inner_state, storage_ids)
    elif isinstance(nested_state, (list, tuple, set)):
        for inner_state in nested_state:
            _find_storages(inner_state, storage_ids)


@dataclass(slots=True, eq=False)
class _BlankArchive(RawIOBase):
    """File object that records what `torch.save` writes, without the bytes of the tensors, which are skipped."""

    parts: list[bytearray | int] = field(default_factory=list)
    """Bytes of the archive, and numbers of bytes reserved for tensors."""
    size: int = 0

    # Any: buffers of torch
    def write(self, data: Any) -> int:
        """Append bytes of the archive."""
        last_part = self.parts[-1] if self.parts else 0
        if isinstance(last_part, bytearray):
            last_part += data
        else:
            self.parts.append(bytearray(data))
        self.size += len(data)
        return len(data)

    def seek(self, num_bytes: int, whence: int = os.SEEK_SET) -> int:
        """Reserve space for the bytes of the next tensor."""
        assert whence == os.SEEK_CUR, (
            f"torch moved to {num_bytes} ({whence}) in an archive that it writes in order"
        )
        if num_bytes:
            self.parts.append(num_bytes)
            self.size += num_bytes
        return self.size


def read_torch(path: Path, allow_pickle: bool = False) -> TensorFile:
    """Map a torch file into memory with the restricted loader, which builds plain values and runs no code.

    Raises: UnsafeCheckpointError when it holds any other type; CorruptCheckpointError when it is damaged.
    """
    try:
        loaded_state = load_torch(path, allow_pickle)
        packed_state, tensors = from_native(loaded_state)
        mapped_file = _find_mapping(path, tensors)
        pieces = {}
        for tensor_name, tensor in tensors.items():
            if isinstance(tensor, Tensor):
                pieces[tensor_name] = Piece(
                    tensor, tuple(tensor.shape), (0,) * tensor.dim(), mapped_file
                )
        is_flat = isinstance(loaded_state, dict)
        for state_key, state_value in loaded_state.items() if is_flat else ():
            if type(state_key) is not str or not isinstance(state_value, Tensor):
                is_flat = False
    except FORGED as error:
        raise CorruptCheckpointError(
            f"{path}: not a valid torch file ({type(error).__name__}: {_shorten(error)}). Nothing was loaded; use "
            "another checkpoint."
        ) from error
    return TensorFile(pieces, {}, None if is_flat else packed_state)


def _find_mapping(
    path: Path, tensors: Mapping[str, Tensor | Slice]
) -> MappedFile | None:
    """Return the file that torch has mapped, so that tensors are read from it in parallel; None if they are elsewhere.

    The first and the last record of the archive must be as far apart as the first and the last storage in memory.
    """
    addresses = []
    for tensor in tensors.values():
        if isinstance(tensor, Tensor) and tensor.numel():
            addresses.append(tensor.untyped_storage().data_ptr())
    if not addresses or not zipfile.is_zipfile(path):
        return None
    record_offsets = []
    with zipfile.ZipFile(path) as archive:
        for record in archive.infolist():
            if "/data/" in record.filename and record.file_size:
                record_offsets.append(record.header_offset)
    if not record_offsets:
        return None
    data_offsets = []
    with open_outside(path) as torch_file:
        for record_offset in (min(record_offsets), max(record_offsets)):
            torch_file.seek(record_offset + _NAME_LENGTH_OFFSET)
            name_length, extra_length = struct.unpack("<HH", torch_file.read(4))
            header_length = _NAME_LENGTH_OFFSET + 4 + name_length + extra_length
            data_offsets.append(record_offset + header_length)
    if max(addresses) - min(addresses) != data_offsets[1] - data_offsets[0]:
        return None
    return MappedFile(path, path.stat().st_size, min(addresses) - data_offsets[0])


def load_torch(path: Path, allow_pickle: bool = False) -> Any:  # Any: any saved object
    """Load what `torch.save` wrote, on the CPU, mapped where possible; unrestricted only if `allow_pickle`."""
    first_bytes = b""
    try:
        with open_outside(path) as torch_file:
            first_bytes = torch_file.read(4)
        # files older than torch 1.6 are no archives and cannot be mapped
        is_mapped = first_bytes == _ZIP
        with warnings.catch_warnings():
            # torch warns about unfamiliar pickle protocols; they end in an error below or in plain values
            warnings.filterwarnings(
                "ignore", message="Detected pickle protocol", category=UserWarning
            )
            return torch.load(
                path, map_location="cpu", weights_only=not allow_pickle, mmap=is_mapped
            )
    except pickle.UnpicklingError as error:
        if (
            first_bytes != _ZIP
            and not first_bytes.startswith(pickle.PROTO)
            and "GLOBAL" not in str(error)
        ):
            # text, an image, ...: not a pickle either
            raise _no_torch_file(path, error) from error
        raise UnsafeCheckpointError(
            f"{path}: holds Python objects that only an unrestricted unpickler could rebuild, which would run code from "
            f"the file ({_shorten(error)}). Nothing was executed. If you trust its origin, load with "
            "allow_pickle=True."
        ) from error
    except FORGED as error:
        raise _no_torch_file(path, error) from error


def _no_torch_file(path: Path, error: BaseException) -> CorruptCheckpointError:
    return CorruptCheckpointError(
        f"{path}: cannot be read as a torch file ({type(error).__name__}: {_shorten(error)}). Nothing was loaded; "
        "use another checkpoint."
    )


def _shorten(error: BaseException) -> str:
    return " ".join(str(error).split())[:200]


def read_tensors(path: Path, allow_pickle: bool = False) -> TensorFile:
    """Map a tensor file by its suffix: safetensors, or torch for `.bin`, `.pt` and `.pth`."""
    if path.suffix == ".safetensors":
        return read_safetensors(path)
    return read_torch(path, allow_pickle)
