"""File formats: tensors as safetensors or torch files, both written as segments and read by memory-mapping."""

from __future__ import annotations

import json
import math
import os
import pickle
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from operator import itemgetter
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import torch
from torch import Tensor
from torch.serialization import skip_data

from hasten.checkpoint.base import Blob, Json, Slice
from hasten.checkpoint.format.manifest import (
    FORGED,
    open_outside,
    size_of,
)
from hasten.checkpoint.format.packing import from_native, to_native
from hasten.errors import CheckpointError, CorruptCheckpointError, UnsafeCheckpointError
from hasten.modules.names import local_tensor
from hasten.runtime.devices import kind_of

_METADATA = "__metadata__"
_OURS = "hasten"
_ZIP: Final = b"PK\x03\x04"
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

    def __init__(self, path: Path, size: int) -> None:
        self.path = path
        found = path.stat()
        self._identity = found.st_dev, found.st_ino
        # Any: the stubs name another base
        storage: Any = torch.UntypedStorage.from_file(str(path), False, size)
        self.data = torch.empty(0, dtype=torch.uint8).set_(storage)

    def place(self, part: Tensor) -> int | None:
        """Return the offset in the file at which a tensor begins; None when the tensor is a copy."""
        start = part.data_ptr() - self.data.data_ptr()
        return start if 0 <= start < self.data.numel() else None

    def open(self) -> int | None:
        """Return a descriptor of the same file; None when the file is no longer there under its name."""
        try:
            fd = os.open(self.path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
        except OSError:  # the mapping stays valid, and reports a broken disk itself
            return None
        found = os.fstat(fd)
        if (found.st_dev, found.st_ino) == self._identity:
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


def dense(tensor: Tensor, key: str) -> Tensor:
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
            f"{key} is a {tensor.layout} tensor on {tensor.device}, which has no plain bytes to store. Convert it to a "
            "dense tensor (or materialise it) before saving."
        )
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    if tensor.device.type != "cpu" and kind_of(tensor.device).lazy:
        tensor = tensor.cpu()
    return tensor if tensor.is_contiguous() else tensor.contiguous()


def tied(tensors: Mapping[str, Tensor | Slice]) -> dict[str, str]:
    """Return the other names of tensors that share memory: alias -> the first name of the tensor.

    Of sharded tensors this rank's parts are compared; tensors without an address of their own are never aliases.
    """
    first: dict[tuple[Any, ...], str] = {}
    aliases = {}
    for key, value in tensors.items():
        data = value.data if isinstance(value, Slice) else local_tensor(value)
        if (
            data.numel() == 0
            or data.layout is not torch.strided
            or data.device.type == "meta"
        ):
            continue
        # no addresses: tied tensors are written twice
        if data.device.type != "cpu" and kind_of(data.device).lazy:
            continue
        if not data.data_ptr():  # a subclass that wraps other tensors
            continue
        where = (
            data.device,
            data.data_ptr(),
            data.dtype,
            value.shape,
            data.shape,
            data.stride(),
        )
        if (earlier := first.setdefault(where, key)) != key:
            aliases[key] = earlier
    return aliases


def encode_safetensors(
    tensors: Mapping[str, Tensor | Slice],
    data: Json = None,
    metadata: Mapping[str, str] | None = None,
) -> Blob:
    """Return one safetensors file: every tensor once (tied names are recorded), `data` in its metadata."""
    aliases = tied(tensors)
    order: list[tuple[int, str, Tensor]] = []
    slices: dict[str, list[list[int]]] = {}
    for key, value in tensors.items():
        if key in aliases:
            continue
        if isinstance(value, Slice):
            slices[key], value = [list(value.shape), list(value.offset)], value.data
        tensor = dense(value, key)
        if tensor.dtype not in DTYPE_NAMES:
            raise CheckpointError(
                f"{key} has dtype {tensor.dtype}, which safetensors cannot hold. Convert it, or save with "
                "safe_serialization=False."
            )
        order.append((-tensor.element_size(), key, tensor))
    # Sorting by element size keeps every tensor aligned without padding, which the format forbids.
    order.sort(key=itemgetter(0, 1))
    ours: dict[str, Any] = {"aliases": aliases} if aliases else {}
    if data is not None:
        ours["data"] = data
    if slices:
        ours["slices"] = slices
    header: dict[str, Any] = {_METADATA: {"format": "pt", **(metadata or {})}}
    if ours:
        header[_METADATA][_OURS] = json.dumps(
            ours, allow_nan=False, separators=(",", ":")
        )
    segments: list[bytes | Tensor] = []
    at = 0
    for _, key, tensor in order:
        size = tensor.numel() * tensor.element_size()
        header[key] = {
            "dtype": DTYPE_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [at, at + size],
        }
        at += size
        if size:
            segments.append(tensor)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    head = len(text).to_bytes(8, "little") + text
    return Blob([head, *segments], len(head) + at)


def read_safetensors(path: Path) -> TensorFile:
    """Map a safetensors file into memory; only the header is read.

    Raises: CorruptCheckpointError naming the file and the problem.
    """
    try:
        return _read_safetensors(path)
    except FORGED as error:
        raise CorruptCheckpointError(
            f"{path}: not a valid safetensors file ({type(error).__name__}: {_short(error)}). Nothing was loaded; use another "
            "checkpoint."
        ) from error


def _read_safetensors(path: Path) -> TensorFile:
    size = size_of(path)
    with open_outside(path) as head:
        length = int.from_bytes(head.read(8), "little")
        if size < 8 or not 2 <= length <= min(_MAX_HEADER_BYTES, size - 8):
            raise ValueError(f"header length {length} in a file of {size} bytes")
        header = json.loads(head.read(length))
    ours = json.loads(header.pop(_METADATA, {}).get(_OURS, "{}"))
    file, base = MappedFile(path, size), 8 + length
    slices, ends, entries = ours.get("slices", {}), base, []
    for key, entry in header.items():
        first, last = entry["data_offsets"]
        entries.append((int(first), int(last), key, entry))
    pieces = {}
    for first, last, key, entry in sorted(entries, key=itemgetter(0, 1)):
        if base + first != ends:
            raise ValueError(f"{key!r} begins at byte {base + first} instead of {ends}")
        pieces[key] = _piece(
            file, key, entry["dtype"], entry["shape"], base + first, slices.get(key)
        )
        ends = base + last
        tensor = pieces[key].data
        if last - first != tensor.numel() * tensor.element_size():
            raise ValueError(
                f"{key!r} of shape {list(tensor.shape)} has {last - first} bytes"
            )
    if ends != size:
        raise ValueError(f"{size - ends} bytes after the last tensor")
    aliases = {}
    for alias, name in ours.get("aliases", {}).items():
        if name not in pieces or alias in pieces:
            raise ValueError(f"alias {alias!r} of {name!r}, which is not in the file")
        aliases[str(alias)] = str(name)
    return TensorFile(pieces, aliases, ours.get("data"))


def _piece(
    file: MappedFile,
    key: str,
    name: str,
    dims: Any,
    start: int,
    position: tuple[Any, Any] | None = None,
) -> Piece:
    """Return a tensor of a mapped file; `position` is the shape of the global tensor and the offset in it."""
    dtype, shape = DTYPES[name], checked_shape(dims)
    end = start + math.prod(shape) * dtype.itemsize
    if start < 0 or end > file.data.numel():
        raise ValueError(
            f"{key!r} of shape {list(shape)} claims bytes {start}..{end} of {file.data.numel()}"
        )
    part = file.data[start:end]
    if start % dtype.itemsize:  # other tools may write unaligned tensors
        part = part.clone()
    data = part.view(dtype).reshape(shape)
    if position is None:
        return Piece(data, shape, (0,) * len(shape), file)
    piece = Piece(data, checked_shape(position[0]), checked_shape(position[1]), file)
    check_piece(key, piece)
    return piece


def checked_shape(values: Any) -> tuple[int, ...]:
    """Return the shape stored in a file. Raises: ValueError if it is not a shape."""
    shape = tuple(values)
    if shape and (
        {*map(type, shape)} != {int} or min(shape) < 0 or max(shape) >= 2**62
    ):
        raise ValueError(f"{values!r} is not a shape")
    return shape


def check_piece(key: str, piece: Piece) -> None:
    """Raise ValueError unless the piece fits inside its tensor."""
    local = piece.data.shape
    fits = len(piece.shape) == len(piece.offset) == len(local) and all(
        start + length <= total
        for start, length, total in zip(piece.offset, local, piece.shape, strict=True)
    )
    if not fits:
        raise ValueError(
            f"piece {key!r} of {list(local)} at {piece.offset} does not fit into {piece.shape}"
        )


def encode_torch(tensors: Mapping[str, Tensor | Slice], data: Json = None) -> Blob:
    """Return one torch file as `torch.save` writes it, with the state in its original nesting.

    `torch.save` lays the file out with the tensor bytes left blank; the tensors follow as segments, so that they
    can be written in parallel and copied from a device piece by piece.
    """
    owned: dict[int, Tensor] = {}
    """Tensors by the id of their blank."""
    blanks: dict[str, Tensor | Slice] = {}
    aliases = tied(tensors)
    for key, value in tensors.items():
        if isinstance(value, Slice):
            raise CheckpointError(
                f"{key} is a slice of a sharded tensor; torch files hold whole tensors only."
            )
        if (same := aliases.get(key)) is not None:
            blanks[key] = blanks[same]
            continue
        tensor = dense(value, key)
        blanks[key] = blank = torch.empty(tensor.shape, dtype=tensor.dtype)
        owned[id(blank)] = tensor
    nested: Any = blanks if data is None else to_native(data, blanks)
    # Any: it implements the methods of a file that torch.save calls
    archive: Any = _BlankArchive()
    with skip_data():
        torch.save(nested, archive)
    found: dict[int, None] = {}
    _find_storages(nested, found)
    blob: Blob = archive.fill([owned[blank_id] for blank_id in found])
    return blob


def _find_storages(value: Any, found: dict[int, None]) -> None:
    """Add the ids of the tensors of a nested value in the order in which pickle meets their storages."""
    if isinstance(value, Tensor):
        found.setdefault(id(value))
    elif isinstance(value, dict):
        for key, inner in value.items():
            _find_storages(key, found)
            _find_storages(inner, found)
    elif isinstance(value, (list, tuple, set)):
        for inner in value:
            _find_storages(inner, found)


class _BlankArchive:
    """File object that records what `torch.save` writes, without the bytes of the tensors, which are skipped."""

    def __init__(self) -> None:
        self._parts: list[bytearray | int] = [bytearray()]
        self._size = 0

    def write(self, data: memoryview) -> int:
        """Append bytes of the archive."""
        if not isinstance(self._parts[-1], bytearray):
            self._parts.append(bytearray())
        last = self._parts[-1]
        assert isinstance(last, bytearray), "it was just added"
        last += data
        self._size += len(data)
        return len(data)

    def seek(self, num_bytes: int, whence: int) -> int:
        """Reserve space for the bytes of the next tensor."""
        assert whence == os.SEEK_CUR, (
            f"torch moved to {num_bytes} ({whence}) in an archive that it writes in order"
        )
        if num_bytes:
            self._parts.append(num_bytes)
            self._size += num_bytes
        return self._size

    def flush(self) -> None:
        """Do nothing: there is no buffer to flush."""

    def fill(self, ordered: list[Tensor]) -> Blob:
        """Return the file with the tensors, in the order of the archive, in their reserved space."""
        segments: list[bytes | Tensor] = []
        tensors = iter([tensor for tensor in ordered if tensor.numel()])
        for part in self._parts:
            if isinstance(part, bytearray):
                segments.append(bytes(part))
                continue
            tensor = next(tensors)
            assert part == tensor.nbytes, (
                f"torch left {part} bytes for a tensor of {tensor.nbytes}"
            )
            segments.append(tensor)
        assert next(tensors, None) is None, "torch left space for every tensor"
        return Blob(segments, self._size)


def read_torch(path: Path, allow_pickle: bool = False) -> TensorFile:
    """Map a torch file into memory with the restricted loader, which builds plain values and runs no code.

    Raises: UnsafeCheckpointError when it holds any other type; CorruptCheckpointError when it is damaged.
    """
    try:
        value = load_torch(path, allow_pickle)
        data, tensors = from_native(value)
        pieces, flat = {}, isinstance(value, dict)
        for key, tensor in tensors.items():
            if isinstance(tensor, Tensor):
                pieces[key] = Piece(tensor, tuple(tensor.shape), (0,) * tensor.dim())
        for key, tensor in value.items() if isinstance(value, dict) else ():
            flat = flat and type(key) is str and isinstance(tensor, Tensor)
    except FORGED as error:
        raise CorruptCheckpointError(
            f"{path}: not a valid torch file ({type(error).__name__}: {_short(error)}). Nothing was loaded; use "
            "another checkpoint."
        ) from error
    return TensorFile(pieces, {}, None if flat else data)


def load_torch(path: Path, allow_pickle: bool = False) -> Any:  # Any: any saved object
    """Load what `torch.save` wrote, on the CPU, mapped where possible; unrestricted only if `allow_pickle`."""
    begins = b""
    try:
        with open_outside(path) as file:
            begins = file.read(4)
        # files older than torch 1.6 are no archives and cannot be mapped
        mapped = begins == _ZIP
        with warnings.catch_warnings():
            # torch warns about unfamiliar pickle protocols; they end in an error below or in plain values
            warnings.filterwarnings(
                "ignore", message="Detected pickle protocol", category=UserWarning
            )
            return torch.load(
                path, map_location="cpu", weights_only=not allow_pickle, mmap=mapped
            )
    except pickle.UnpicklingError as error:
        if (
            begins != _ZIP
            and not begins.startswith(pickle.PROTO)
            and "GLOBAL" not in str(error)
        ):
            # text, an image, ...: not a pickle either
            raise _no_torch_file(path, error) from error
        raise UnsafeCheckpointError(
            f"{path}: holds Python objects that only an unrestricted unpickler could rebuild, which would run code from "
            f"the file ({_short(error)}). Nothing was executed. If you trust its origin, load with "
            "allow_pickle=True."
        ) from error
    except FORGED as error:
        raise _no_torch_file(path, error) from error


def _no_torch_file(path: Path, error: BaseException) -> CorruptCheckpointError:
    return CorruptCheckpointError(
        f"{path}: cannot be read as a torch file ({type(error).__name__}: {_short(error)}). Nothing was loaded; "
        "use another checkpoint."
    )


def _short(error: BaseException) -> str:
    return " ".join(str(error).split())[:200]


def read_tensors(path: Path, allow_pickle: bool = False) -> TensorFile:
    """Map a tensor file by its suffix: safetensors, or torch for `.bin`, `.pt` and `.pth`."""
    if path.suffix == ".safetensors":
        return read_safetensors(path)
    return read_torch(path, allow_pickle)
