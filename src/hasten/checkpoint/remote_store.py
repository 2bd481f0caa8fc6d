"""Checkpoints at any fsspec URL: files first, the manifest last, and nothing counts before it is there."""

from __future__ import annotations

import secrets
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from hasten.checkpoint.base import Blob
from hasten.checkpoint.checksum import Checksum
from hasten.checkpoint.disk import chunk_parts, default_threads, host_views, segment_starts
from hasten.checkpoint.local_store import same_family
from hasten.checkpoint.manifest import (
    CHUNK_BYTES,
    MANIFEST_NAME,
    MAX_MANIFEST_BYTES,
    FileRecord,
    Manifest,
    decode,
    encode,
    inside,
    safe_name,
)
from hasten.checkpoint.transfer import HostBuffer
from hasten.errors import CheckpointError, CorruptCheckpointError, IncompleteCheckpointError
from hasten.optional import need

_OBJECTS: Final = frozenset({"s3", "s3a", "gs", "gcs", "abfs", "az", "adl", "oss", "oci"})
"""Object stores have no folders; making one there could create a bucket by a slip of the pen."""


def is_url(place: str) -> bool:
    """Whether a place is a URL rather than a path."""
    scheme, mark, _ = place.partition("://")
    return bool(mark) and len(scheme) > 1


class RemoteDraft:
    """A checkpoint being uploaded; a second save under one name uploads beside the first and replaces its manifest."""

    def __init__(self, store: RemoteStore, name: str, token: str) -> None:
        self._store = store
        self._name = name
        self._token = token
        self._scratch: tempfile.TemporaryDirectory[str] | None = None

    @property
    def name(self) -> str:
        return self._name

    @property
    def token(self) -> str:
        return self._token

    @property
    def folder(self) -> Path:
        """A local folder for hooks; its files are uploaded by `adopt`."""
        if self._scratch is None:
            self._scratch = tempfile.TemporaryDirectory(prefix="hasten-hooks-")
        return Path(self._scratch.name)

    def _placed(self, file: str) -> str:
        prefix = self._token.partition(":")[2]
        return f"{prefix}/{file}" if prefix else file

    def put(self, files: Mapping[str, Blob]) -> dict[str, FileRecord]:
        """Upload files side by side, taking the checksums on the way."""
        with ThreadPoolExecutor(default_threads(), thread_name_prefix="hasten-upload") as pool:
            records = pool.map(lambda item: self._upload(*item), files.items())
            return dict(zip(files, records, strict=True))

    def _upload(self, file: str, blob: Blob) -> FileRecord:
        buffer, starts, sums = HostBuffer(), segment_starts(blob), []
        with self._store.fs.open(self._store.join_path(self._name, self._placed(file)), "wb") as out:
            for start in range(0, blob.size, CHUNK_BYTES):
                parts = chunk_parts(blob, start, min(start + CHUNK_BYTES, blob.size), starts)
                total = Checksum()
                for view in host_views(parts, buffer):
                    total.update(view)
                    out.write(view)
                sums.append(total.digest())
        return FileRecord(name=self._placed(file), size=blob.size, sums=tuple(sums))

    def adopt(self, known: Sequence[str]) -> list[FileRecord]:
        """Upload what hooks left in the local folder."""
        if self._scratch is None:
            return []
        blobs = {}
        for path in sorted(self.folder.rglob("*")):
            if path.is_file():
                raw = path.read_bytes()
                blobs[path.relative_to(self.folder).as_posix()] = Blob([raw], len(raw))
        self._scratch.cleanup()
        self._scratch = None
        return list(self.put(blobs).values())

    def commit(self, manifest: Manifest) -> None:
        """Upload the manifest: from then on, and not before, the checkpoint is there."""
        for file in manifest.files:
            size = self._store.fs.size(self._store.join_path(self._name, file.name))
            if size != file.size:
                raise CheckpointError(
                    f"{file.name} arrived at {self._store.address} with {size} of {file.size} bytes, so the checkpoint "
                    "was not committed. Save again; look at the storage service if it happens again."
                )
        before = self._store.listed_files(self._name)
        self._store.fs.pipe_file(self._store.join_path(self._name, MANIFEST_NAME), encode(manifest))
        kept = {file.name for file in manifest.files}
        self._store.remove(self._name, [file for file in before if file not in kept])

    def abort(self) -> None:
        """Remove what was uploaded."""
        if self._scratch is not None:
            self._scratch.cleanup()
            self._scratch = None
        self._store.sweep(self._name)


class RemoteStore:
    """Checkpoints as folders under one URL of any file system fsspec knows."""

    def __init__(self, url: str, **options: Any) -> None:  # Any: options of the file system (keys, endpoints)
        fsspec = need("fsspec", why=f"checkpoints at {url}")
        self.fs, self._root = fsspec.core.url_to_fs(url.rstrip("/"), **options)
        self._url = url.rstrip("/")

    @property
    def address(self) -> str:
        return self._url

    @property
    def remote(self) -> bool:
        return True

    def join_path(self, *parts: str) -> str:
        """A path inside the store, as the file system spells it."""
        return "/".join((self._root.rstrip("/"), *parts))

    def begin(self, name: str) -> RemoteDraft:
        """A new draft. Files of a committed checkpoint of this name are never touched: new ones go beside them."""
        try:
            for other in self._folders():
                if same_family(name, other):
                    self.sweep(other)
            token = secrets.token_hex(6)
            taken = self.fs.exists(self.join_path(name, MANIFEST_NAME))
            if not _OBJECTS.intersection(
                (self.fs.protocol,) if isinstance(self.fs.protocol, str) else self.fs.protocol
            ):
                self.fs.makedirs(self.join_path(name), exist_ok=True)
            return RemoteDraft(self, name, f"{token}:v-{token}" if taken else f"{token}:")
        except OSError as error:
            raise CheckpointError(
                f"cannot start the checkpoint {name!r} at {self._url}: {error}. Nothing was changed. Check the URL and "
                "the credentials of the storage service."
            ) from error

    def join(self, name: str, token: str) -> RemoteDraft:
        """The draft main began: every process sees a URL."""
        return RemoteDraft(self, name, token)

    def _folders(self) -> list[str]:
        self.fs.invalidate_cache()
        if not self.fs.exists(self._root):
            return []
        entries = self.fs.ls(self._root, detail=True)
        return [str(e["name"]).rstrip("/").rpartition("/")[2] for e in entries if e["type"] == "directory"]

    def _found(self, name: str) -> list[str]:
        self.fs.invalidate_cache()
        base = self.join_path(name)
        if not self.fs.exists(base):
            return []
        prefix = str(self.fs._strip_protocol(base)).rstrip("/") + "/"
        return [str(path).removeprefix(prefix) for path in self.fs.find(base)]

    def listed_files(self, name: str) -> list[str]:
        """Files of the committed checkpoint of this name; none when there is none that can be read."""
        try:
            return [file.name for file in self.manifest(name).files]
        except CheckpointError:  # absent or damaged: then nothing is known to be part of it
            return []

    def sweep(self, name: str) -> None:
        """Remove what no manifest lists: leftovers of saves that never came to their end."""
        listed = set(self.listed_files(name))
        self.remove(name, [file for file in self._found(name) if file not in listed and file != MANIFEST_NAME])

    def remove(self, name: str, files: Sequence[str]) -> None:
        """Delete files of a checkpoint."""
        if files:
            self.fs.rm([self.join_path(name, file) for file in files])

    def names(self) -> list[str]:
        """Folders with a manifest."""
        return sorted(n for n in self._folders() if self.fs.exists(self.join_path(n, MANIFEST_NAME)))

    def manifest(self, name: str) -> Manifest:
        """The verified manifest."""
        path = self.join_path(name, MANIFEST_NAME)
        where = f"{self._url}/{name}/{MANIFEST_NAME}"
        try:
            if self.fs.size(path) > MAX_MANIFEST_BYTES:
                raise CorruptCheckpointError(f"{where}: larger than any manifest. Use another checkpoint.")
            return decode(self.fs.cat_file(path), where)
        except FileNotFoundError as error:
            raise IncompleteCheckpointError(
                f"{where} does not exist, so there is no complete checkpoint at {self._url}/{name}. Give another URL."
            ) from error
        except OSError as error:
            raise CheckpointError(f"{where} cannot be read: {error}. Check the URL and the credentials.") from error

    def complete(self, name: str) -> bool:
        """Whether the manifest is readable and every file is there with its size."""
        try:
            manifest = self.manifest(name)
            return all(self.fs.size(self.join_path(name, file.name)) == file.size for file in manifest.files)
        except (CheckpointError, OSError):  # what is wrong is said when it is loaded by name
            return False

    @contextmanager
    def fetch(self, name: str, files: Sequence[FileRecord]) -> Iterator[Path]:
        """Download the files into a temporary folder, several at a time."""
        with tempfile.TemporaryDirectory(prefix="hasten-fetch-") as scratch:
            folder = Path(scratch)

            def download(file: FileRecord) -> None:
                target = inside(folder, safe_name(file.name, self._url))
                target.parent.mkdir(parents=True, exist_ok=True)
                try:
                    self.fs.get_file(self.join_path(name, file.name), str(target))
                except FileNotFoundError as error:
                    raise IncompleteCheckpointError(
                        f"{self._url}/{name}: {file.name} is missing. Nothing was loaded. Load another checkpoint."
                    ) from error

            with ThreadPoolExecutor(default_threads(), thread_name_prefix="hasten-download") as pool:
                list(pool.map(download, files))
            yield folder

    def delete(self, name: str) -> None:
        """Remove the manifest first, so that no reader sees a part of the checkpoint, then the rest."""
        self.remove(name, [MANIFEST_NAME])
        self.remove(name, self._found(name))
        if self.fs.exists(self.join_path(name)):
            self.fs.rm(self.join_path(name), recursive=True)
