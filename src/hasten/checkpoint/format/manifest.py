"""The manifest: a checkpoint's table of contents, strictly validated; safe opening of the files that it lists."""

from __future__ import annotations

import os
import pickle
import re
import stat
import struct
import zlib
from collections.abc import Iterable
from operator import attrgetter
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, Final

import msgspec
import xxhash

from hasten.errors import (
    CheckpointError,
    CheckpointVersionError,
    CorruptCheckpointError,
    UnsafeCheckpointError,
)

MANIFEST_NAME = "manifest.json"
FORMAT_VERSION = 5
MAX_MANIFEST_BYTES = 256 * 1024**2
_LAST_SECOND = 253_000_000_000.0
"""Latest accepted time stamp, in seconds since 1970: shortly before the year 10000, the end of `datetime`."""
CHUNK_BYTES = 16 * 1024**2
"""Checksums are taken over chunks of this size, so that many threads can write and verify one file."""
MAX_TABLE_BYTES: Final = 1024**3
"""Upper limit of a manifest, index or table; those of a model over ten thousand ranks have some 100 MB."""
FORGED: Final = (
    *(
        ArithmeticError,
        AssertionError,
        AttributeError,
        EOFError,
        ImportError,
        LookupError,
        MemoryError,
        OSError,
    ),
    *(RuntimeError, TypeError, ValueError, pickle.PickleError, struct.error),
)
"""Errors that readers of structured files raise for invalid content."""
_FORBIDDEN: Final = frozenset('\\:*?"<>|').union(map(chr, range(32)), chr(127))
"""Characters that some operating system does not allow in file names."""
_FILE_KINDS: Final = (
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISFIFO, "a pipe"),
    (stat.S_ISSOCK, "a socket"),
)


_NUMBERED: Final = re.compile(r"checkpoint_(\d+)")
DRAFT_PREFIX: Final = ".hasten-draft."
"""Start of the names of hidden folders that a save writes into; a token follows."""


class FileRecord(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One file: its path inside the checkpoint, its size and the checksum of each chunk, as hex digits."""

    name: str
    size: int
    sums: tuple[str, ...]
    component: str | None = None
    rank: int | None = None


class ComponentRecord(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True
):
    """One component: its kind, and whether each rank has separate files."""

    kind: str
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

    @property
    def num_bytes(self) -> int:
        """Size of all files together."""
        return sum(map(attrgetter("size"), self.files))

    def files_of(
        self, component_name: str, rank: int | None = None
    ) -> list[FileRecord]:
        """Return the files of a component, in order; of one rank if given."""
        component_files = []
        for file in self.files:
            if file.component == component_name and (rank is None or file.rank == rank):
                component_files.append(file)
        return component_files


def numbered_checkpoint(number: int) -> str:
    """Return the name of an automatically numbered checkpoint."""
    return f"checkpoint_{number}"


def checkpoint_number(checkpoint_name: str) -> int | None:
    """Return the number in an automatic name; None for other names."""
    match = _NUMBERED.fullmatch(checkpoint_name)
    return int(match[1]) if match else None


def next_number(checkpoint_names: Iterable[str], at_least: int) -> int:
    """Return a number above all numbers in use, and not below `at_least`."""
    free_number = at_least
    for checkpoint_name in checkpoint_names:
        used_number = checkpoint_number(checkpoint_name)
        if used_number is not None:
            free_number = max(free_number, used_number + 1)
    return free_number


def draft_of(manifest: Manifest | None) -> str | None:
    """Return the path of the draft that a manifest's files are still in; None if they have their final names."""
    if manifest is None or not manifest.files:
        return None
    path_parts = manifest.files[0].name.split("/")
    if len(path_parts) < 3 or not path_parts[0].startswith(DRAFT_PREFIX):
        return None
    return f"{path_parts[0]}/{path_parts[1]}"


class _Envelope(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    crc32: str
    manifest: msgspec.Raw


class _Version(msgspec.Struct, frozen=True):
    version: int


def encode_manifest(manifest: Manifest) -> bytes:
    """Return the manifest as JSON, with its checksum."""
    manifest_json = msgspec.json.format(msgspec.json.encode(manifest), indent=1)
    return (
        b'{"crc32":"%08x","manifest":' % zlib.crc32(manifest_json)
        + manifest_json
        + b"}\n"
    )


def decode_manifest(raw_manifest: bytes, manifest_path: str) -> Manifest:
    """Decode and validate a manifest.

    Raises: CorruptCheckpointError, CheckpointVersionError or UnsafeCheckpointError, naming `where`.
    """
    try:
        envelope = msgspec.json.decode(raw_manifest, type=_Envelope)
        manifest_json = bytes(envelope.manifest)
        if f"{zlib.crc32(manifest_json):08x}" != envelope.crc32:
            raise CorruptCheckpointError(
                f"{manifest_path}: the manifest's checksum does not match its content, so it is damaged and cannot be "
                "trusted. Load another checkpoint."
            )
        version = msgspec.json.decode(manifest_json, type=_Version).version
        if version != FORMAT_VERSION:
            age = "a newer" if version > FORMAT_VERSION else "an older"
            raise CheckpointVersionError(
                f"{manifest_path}: written in checkpoint format {version} by {age} version of hasten; this one reads format {FORMAT_VERSION}. "
                "Load it with the version of hasten that wrote it."
            )
        manifest = msgspec.json.decode(manifest_json, type=Manifest)
    except (
        msgspec.MsgspecError,
        UnicodeDecodeError,
        RecursionError,
        OverflowError,
    ) as error:
        raise CorruptCheckpointError(
            f"{manifest_path}: not a manifest hasten can read ({error}); the checkpoint is damaged or was written by another "
            "tool. Load another checkpoint, or convert it with `hasten ckpt convert`."
        ) from error
    problem = _find_contradiction(manifest) or _find_component_without_files(manifest)
    if problem:
        raise CorruptCheckpointError(
            f"{manifest_path}: {problem}; the manifest contradicts itself, so nothing of it can be trusted. "
            "Load another checkpoint."
        )
    for file in manifest.files:
        safe_name(file.name, manifest_path)
    return manifest


def _find_contradiction(manifest: Manifest) -> str | None:
    if manifest.world_size < 1:
        return f"world_size={manifest.world_size} must be positive"
    if not 0 <= manifest.created_s < _LAST_SECOND:
        return f"created_s={manifest.created_s} is no time of this era"
    if (manifest.step or 0) < 0 or (manifest.number or 0) < 0:
        return f"step={manifest.step} and number={manifest.number} must not be negative"
    if (
        manifest.ranks
        and not 0 <= min(manifest.ranks) <= max(manifest.ranks) < manifest.world_size
    ):
        return (
            f"ranks {list(manifest.ranks)} do not fit world_size={manifest.world_size}"
        )
    folded_names: set[str] = set()
    for file in manifest.files:
        folded_name = file.name.casefold()
        if folded_name in folded_names or folded_name == MANIFEST_NAME:
            return f"file {file.name!r} is listed twice"
        folded_names.add(folded_name)
        if file.size < 0 or len(file.sums) != -(-file.size // CHUNK_BYTES):
            return f"file {file.name!r} has size {file.size} but {len(file.sums)} chunk checksums"
        if file.component is not None and file.component not in manifest.components:
            return f"file {file.name!r} belongs to the unknown component {file.component!r}"
        if file.rank is not None and not 0 <= file.rank < manifest.world_size:
            return f"file {file.name!r} belongs to rank {file.rank} of {manifest.world_size}"
    return None


def _find_component_without_files(manifest: Manifest) -> str | None:
    for component_name, component in manifest.components.items():
        if not component.per_rank:
            if not manifest.files_of(component_name):
                return f"component {component_name!r} has no file"
            continue
        ranks_with_files = set(
            map(attrgetter("rank"), manifest.files_of(component_name))
        )
        missing_ranks = sorted(set(manifest.ranks) - ranks_with_files)
        if missing_ranks:
            return f"component {component_name!r} has no file of ranks {missing_ranks}"
    return None


def safe_name(file_name: str, manifest_path: str) -> str:
    """Return the file name if it stays inside the checkpoint's folder on every operating system.

    Raises: UnsafeCheckpointError otherwise.
    """
    path_parts = PurePosixPath(file_name).parts
    is_unsafe = (
        not file_name
        or len(file_name) > 1024
        or file_name.startswith("/")
        or not _FORBIDDEN.isdisjoint(file_name)
        or not {"..", "."}.isdisjoint(file_name.split("/"))
        or "/".join(path_parts) != file_name
    )
    if is_unsafe:
        raise UnsafeCheckpointError(
            f"{manifest_path}: the manifest names the file {file_name[:120]!r}, which may lie outside the checkpoint's folder. "
            "Nothing was read. Do not use this checkpoint: it was edited."
        )
    return file_name


def resolve_inside(folder: Path, file_name: str) -> Path:
    """Return the path of a file of the checkpoint; links that lead out of the folder are refused.

    Raises: UnsafeCheckpointError.
    """
    file_path = folder / safe_name(file_name, str(folder))
    allowed_roots = [folder.resolve()]
    # the Hub's cache: files of a snapshot are links to shared files
    if folder.parent.name == "snapshots":
        allowed_roots.append((folder.parent.parent / "blobs").resolve())
    if not any(map(file_path.resolve().is_relative_to, allowed_roots)):
        raise UnsafeCheckpointError(
            f"{file_path} is a link that leads out of the checkpoint, to {file_path.resolve()}. Nothing was read. "
            "Copy the file into the checkpoint's folder if it really belongs there."
        )
    return file_path


BytesLike = bytes | bytearray | memoryview


def checksum(chunk: BytesLike) -> str:
    """Return the 64-bit XXH3 of a chunk as 16 hex digits.

    Like a CRC it detects damage of every kind, and does not protect against deliberate forgery.
    """
    return xxhash.xxh3_64_hexdigest(chunk)


def size_of(
    path: Path,
    most_bytes: int | None = None,
    file_status: os.stat_result | None = None,
) -> int:
    """Return the size of a file that is about to be opened by its path, or that was opened with this status.

    Raises: OSError when it does not exist; UnsafeCheckpointError for a pipe, socket, device or folder, which could
    block the reader or never end; CorruptCheckpointError above `most_bytes`.
    """
    if file_status is None:
        file_status = path.stat()
    if not stat.S_ISREG(file_status.st_mode):
        file_kind = "a device"
        for is_kind, kind_words in _FILE_KINDS:
            if is_kind(file_status.st_mode):
                file_kind = kind_words
        raise UnsafeCheckpointError(
            f"{path} is {file_kind} instead of a file, and reading it could block or never end. Nothing was read. Do not use "
            "this folder unless you know why it is there."
        )
    if most_bytes is not None and file_status.st_size > most_bytes:
        raise CorruptCheckpointError(
            f"{path} has {file_status.st_size} bytes, more than the {most_bytes} such a file can have; it was not read, since it would "
            "fill the memory. Use another copy of the checkpoint."
        )
    return file_status.st_size


def open_outside(path: Path, most_bytes: int | None = None) -> BinaryIO:
    """Open a regular file for reading without ever waiting for a writer.

    Raises: as `size_of`.
    """
    size_of(path, most_bytes)  # opening a device may already act on it
    flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0)
    descriptor = os.open(path, flags)
    try:
        size_of(path, most_bytes, os.fstat(descriptor))
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def read_outside(path: Path, most_bytes: int = MAX_TABLE_BYTES) -> bytes:
    """Read a whole file of at most `most_bytes`.

    Raises: as `size_of`.
    """
    with open_outside(path, most_bytes) as file:
        return file.read(most_bytes)


def read_manifest(path: Path) -> Manifest | None:
    """Return the manifest in a file; None when it is missing or unreadable."""
    try:
        return decode_manifest(read_outside(path, MAX_MANIFEST_BYTES), str(path))
    except (OSError, CheckpointError):
        return None


def missing_files(folder: Path, files: Iterable[FileRecord]) -> list[str]:
    """Return the names of files that are not in the folder with their size."""
    missing_names = []
    for file in files:
        try:
            file_size: int | None = (folder / file.name).stat().st_size
        except OSError:
            file_size = None
        if file_size != file.size:
            missing_names.append(file.name)
    return missing_names
