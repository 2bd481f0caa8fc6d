"""The manifest: the table of contents of a complete checkpoint, strictly decoded and validated; checksums of chunks."""

from __future__ import annotations

import zlib
from pathlib import Path, PurePosixPath
from typing import Any, Final, Literal, Protocol

import msgspec
import numpy as np
import xxhash

from hasten.errors import CheckpointVersionError, CorruptCheckpointError, UnsafeCheckpointError

MANIFEST_NAME = "manifest.json"
FORMAT_VERSION = 4
READ_VERSIONS = (3, 4)
"""Readable format versions. Format 3 has column checksums of 8 hex digits, format 4 XXH3 checksums of 16."""
MAX_MANIFEST_BYTES = 256 * 1024**2
_LAST_SECOND = 253_000_000_000.0
"""Latest accepted time stamp, in seconds since 1970: shortly before the year 10000, the end of `datetime`."""
CHUNK_BYTES = 16 * 1024**2
"""Checksums are taken over chunks of this size, so that many threads can write and verify one file."""


class FileRecord(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One file: its path inside the checkpoint, its size and the checksum of each chunk, as hex digits."""

    name: str
    size: int
    sums: tuple[str, ...]
    component: str | None = None
    rank: int | None = None


class ComponentRecord(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One component: its kind, the format of its files, and whether each rank has separate files."""

    kind: str
    format: Literal["safetensors", "torch"]
    per_rank: bool = False


class Manifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Table of contents of a checkpoint; a checkpoint is complete when its manifest exists."""

    version: int = FORMAT_VERSION
    number: int | None = None
    step: int | None = None
    created_s: float = 0.0
    world_size: int = 1
    ranks: tuple[int, ...] = (0,)
    mesh: dict[str, int] = {}
    versions: dict[str, str] = {}
    metrics: dict[str, float | None] = {}
    components: dict[str, ComponentRecord] = {}
    files: tuple[FileRecord, ...] = ()
    # Any: JSON written by the run (settings, tracker run ids); shown and returned, never interpreted here.
    notes: dict[str, Any] = {}
    chunk_bytes: int = CHUNK_BYTES

    @property
    def num_bytes(self) -> int:
        """Size of all files together."""
        return sum(file.size for file in self.files)

    def files_of(self, component: str, rank: int | None = None) -> list[FileRecord]:
        """Return the files of a component, in order; of one rank if given."""
        return [f for f in self.files if f.component == component and (rank is None or f.rank == rank)]


class _Envelope(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    crc32: str
    manifest: msgspec.Raw


class _Version(msgspec.Struct, frozen=True):
    version: int


def encode(manifest: Manifest) -> bytes:
    """Return the manifest as JSON, with its checksum."""
    body = msgspec.json.format(msgspec.json.encode(manifest), indent=1)
    return b'{"crc32":"%08x","manifest":' % zlib.crc32(body) + body + b"}\n"


def decode(raw: bytes, where: str) -> Manifest:
    """Decode and validate a manifest.

    Raises: CorruptCheckpointError, CheckpointVersionError or UnsafeCheckpointError, naming `where`.
    """
    try:
        envelope = msgspec.json.decode(raw, type=_Envelope)
        body = bytes(envelope.manifest)
        if f"{zlib.crc32(body):08x}" != envelope.crc32:
            raise CorruptCheckpointError(
                f"{where}: the manifest's checksum does not match its content, so it is damaged and cannot be "
                "trusted. Load another checkpoint."
            )
        version = msgspec.json.decode(body, type=_Version).version
        if version not in READ_VERSIONS:
            raise CheckpointVersionError(
                f"{where}: written in checkpoint format {version}; this version of hasten reads formats "
                f"{' and '.join(map(str, READ_VERSIONS))}. Load it with the version of hasten that wrote it."
            )
        manifest = msgspec.json.decode(body, type=Manifest)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, OverflowError) as error:
        raise CorruptCheckpointError(
            f"{where}: not a manifest hasten can read ({error}); the checkpoint is damaged or was written by another "
            "tool. Load another checkpoint, or convert it with `hasten ckpt convert`."
        ) from error
    _check(manifest, where)
    return manifest


def _check(manifest: Manifest, where: str) -> None:
    problem = _problem(manifest)
    if problem:
        raise CorruptCheckpointError(
            f"{where}: {problem}; the manifest contradicts itself, so nothing of it can be trusted. "
            "Load another checkpoint."
        )
    for file in manifest.files:
        safe_name(file.name, where)


def _problem(manifest: Manifest) -> str | None:
    if manifest.world_size < 1 or manifest.chunk_bytes < 1:
        return f"world_size={manifest.world_size} and chunk_bytes={manifest.chunk_bytes} must be positive"
    if not 0 <= manifest.created_s < _LAST_SECOND:
        return f"created_s={manifest.created_s} is no time of this era"
    if any(value is not None and value < 0 for value in (manifest.step, manifest.number)):
        return f"step={manifest.step} and number={manifest.number} must not be negative"
    if any(not 0 <= rank < manifest.world_size for rank in manifest.ranks):
        return f"ranks {list(manifest.ranks)} do not fit world_size={manifest.world_size}"
    names: set[str] = set()
    for file in manifest.files:
        folded = file.name.casefold()
        if folded in names or folded == MANIFEST_NAME:
            return f"file {file.name!r} is listed twice"
        names.add(folded)
        if file.size < 0 or len(file.sums) != -(-file.size // manifest.chunk_bytes):
            return f"file {file.name!r} has size {file.size} but {len(file.sums)} chunk checksums"
        if file.component is not None and file.component not in manifest.components:
            return f"file {file.name!r} belongs to the unknown component {file.component!r}"
        if file.rank is not None and not 0 <= file.rank < manifest.world_size:
            return f"file {file.name!r} belongs to rank {file.rank} of {manifest.world_size}"
    return _missing_files(manifest)


def _missing_files(manifest: Manifest) -> str | None:
    for name, component in manifest.components.items():
        if not component.per_rank:
            if not manifest.files_of(name):
                return f"component {name!r} has no file"
            continue
        held = {file.rank for file in manifest.files_of(name)}
        absent = sorted(set(manifest.ranks) - held)
        if absent:
            return f"component {name!r} has no file of ranks {absent}"
    return None


def safe_name(name: str, where: str) -> str:
    """Return the file name if it stays inside the checkpoint's folder on every operating system.

    Raises: UnsafeCheckpointError otherwise.
    """
    parts = PurePosixPath(name).parts
    bad = (
        not name
        or len(name) > 1024
        or name.startswith("/")
        or any(char in name for char in '\\:*?"<>|')
        or any(ord(char) < 32 or ord(char) == 127 for char in name)
        or any(part in ("..", ".") for part in name.split("/"))
        or "/".join(parts) != name
    )
    if bad:
        raise UnsafeCheckpointError(
            f"{where}: the manifest names the file {name[:120]!r}, which may lie outside the checkpoint's folder. "
            "Nothing was read. Do not use this checkpoint: somebody has edited it."
        )
    return name


def inside(folder: Path, name: str) -> Path:
    """Return the path of a file of the checkpoint; links that lead out of the folder are refused.

    Raises: UnsafeCheckpointError.
    """
    path = folder / safe_name(name, str(folder))
    roots = [folder.resolve()]
    if folder.parent.name == "snapshots":  # the Hub's cache: files of a snapshot are links to shared files
        roots.append((folder.parent.parent / "blobs").resolve())
    if not any(path.resolve().is_relative_to(root) for root in roots):
        raise UnsafeCheckpointError(
            f"{path} is a link that leads out of the checkpoint, to {path.resolve()}. Nothing was read. "
            "Copy the file into the checkpoint's folder if it really belongs there."
        )
    return path


_WORDS: Final = 1021  # per row; a prime, so that data shifted by sectors or pages changes columns
_ROWS: Final = 17  # odd, so that a bit stuck in a whole column does not cancel out
BLOCK_BYTES: Final = _ROWS * _WORDS * 8
"""Format 3 splits a chunk into blocks of rows of 64-bit words."""
_COLUMN_DIGITS: Final = 8
Bytes = bytes | bytearray | memoryview


class Summing(Protocol):
    """Protocol of an incremental checksum."""

    def update(self, piece: Bytes) -> None:
        """Add bytes, any number. Long pieces are best: threads wait for each other between calls."""
        ...

    def digest(self) -> str:
        """Return the checksum as hex digits."""
        ...


class Checksum:
    """The 64-bit XXH3 of one chunk, computed incrementally.

    It detects every kind of damage equally, at the speed of memory. Like a CRC it guards against damage, not against
    deliberate forgery.
    """

    def __init__(self) -> None:
        self._state = xxhash.xxh3_64()

    def update(self, piece: Bytes) -> None:
        self._state.update(piece)

    def digest(self) -> str:
        """Return the checksum as 16 hex digits."""
        return self._state.hexdigest()


class ColumnChecksum:
    """The checksum of format 3, which is read and no longer written.

    In every block each column of words is summed; a CRC-32 over these sums, in order, is the checksum. A changed bit
    changes a column; bytes that are lost, shifted or swapped land in other columns or other blocks. Undetected are
    changes that cancel out within one column of a block, such as two words swapped a multiple of 8168 bytes apart.
    """

    def __init__(self) -> None:
        self._crc = 0
        self._begun = b""  # bytes of an incomplete block

    def update(self, piece: Bytes) -> None:
        """Add bytes, any number. Long pieces are best: threads wait for each other between calls."""
        view = memoryview(piece).cast("B")
        if self._begun:
            missing = BLOCK_BYTES - len(self._begun)
            self._begun, view = self._begun + bytes(view[:missing]), view[missing:]
            if len(self._begun) < BLOCK_BYTES:
                return
            self._add(self._begun)
        whole = view.nbytes // BLOCK_BYTES * BLOCK_BYTES
        if whole:
            self._add(view[:whole])
        self._begun = bytes(view[whole:])

    def _add(self, blocks: Bytes) -> None:
        sums = np.add.reduce(np.frombuffer(blocks, np.uint64).reshape(-1, _ROWS, _WORDS), axis=1)
        self._crc = zlib.crc32(sums.data, self._crc)

    def digest(self) -> str:
        """Return the checksum as 8 hex digits; nothing can be added afterwards."""
        if self._begun:
            self.update(bytes(BLOCK_BYTES - len(self._begun)))
        return f"{self._crc:08x}"


def summing_like(known: str) -> type[Checksum | ColumnChecksum]:
    """Return the checksum class that produced `known`, judged by its length."""
    return ColumnChecksum if len(known) == _COLUMN_DIGITS else Checksum


def checksum(chunk: Bytes, kind: type[Checksum | ColumnChecksum] = Checksum) -> str:
    """Return the checksum of a chunk in memory."""
    total: Summing = kind()
    total.update(chunk)
    return total.digest()
