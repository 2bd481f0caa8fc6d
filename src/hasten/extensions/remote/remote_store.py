"""Checkpoints at any fsspec URL: files under the prefix of a version first, the manifest last, which makes them visible."""

from __future__ import annotations

import logging
import random
import re
import secrets
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import msgspec
import xxhash

from hasten.checkpoint.base import Blob
from hasten.checkpoint.format.manifest import (
    CHUNK_BYTES,
    MANIFEST_NAME,
    MAX_MANIFEST_BYTES,
    FileRecord,
    Manifest,
    checkpoint_number,
    decode_manifest,
    encode_manifest,
    next_number,
    numbered_checkpoint,
    resolve_inside,
    safe_name,
)
from hasten.checkpoint.store.disk import (
    HostBuffer,
    devices_of,
    host_views,
    segment_starts,
    worker_pool,
)
from hasten.checkpoint.store.local_store import check_hooked, describe_file
from hasten.errors import (
    CheckpointError,
    CorruptCheckpointError,
    IncompleteCheckpointError,
)
from hasten.optional import need

log = logging.getLogger(__name__)
_VERSION_FOLDER: Final = re.compile(r"v-([0-9a-f]{8})-[0-9a-f]{12}/")
"""Subfolder for the files of one save, with the second of its start."""
_FOLDER_NOTE: Final = "folder"
"""Name of the note in a manifest with the subfolder."""
_RESERVATION_FILE: Final = "started"
"""File in the subfolder that reserves the checkpoint's number."""
_ABANDONED_AFTER_S: Final = 24 * 3600.0
_OBJECT_STORE_PROTOCOLS: Final = frozenset(
    {"s3", "s3a", "gs", "gcs", "abfs", "az", "adl", "oss", "oci"}
)
"""Object stores have no folders; making one there could accidentally create a bucket."""


class RemoteDraft:
    """A checkpoint being uploaded, next to an earlier one of its name, whose manifest it replaces."""

    def __init__(self, store: RemoteStore, name: str, version: str) -> None:
        self._store = store
        self.name = name
        self.token = version
        self.keeps_exports = True
        """Of no effect at a URL, where other files are never changed."""
        self._scratch: tempfile.TemporaryDirectory[str] | None = None

    @property
    def folder(self) -> Path:
        """Local folder for hooks; its files are uploaded by `put`."""
        if self._scratch is None:
            self._scratch = tempfile.TemporaryDirectory(prefix="hasten-hooks-")
        folder = Path(self._scratch.name) / self.name
        folder.mkdir(exist_ok=True)
        return folder

    def _join_path(self, file_name: str) -> str:
        return self._store.join_path(self.name, self.token, file_name)

    def put(self, files: Mapping[str, Blob]) -> dict[str, FileRecord]:
        """Upload files, and those of hooks in this rank's local folder, in parallel; return records with checksums."""
        hook_files = self._list_hook_files(files)
        with worker_pool("hasten-upload") as thread_pool:
            file_records = dict(
                zip(
                    files,
                    thread_pool.map(
                        lambda named_blob: self._upload_file(*named_blob), files.items()
                    ),
                    strict=True,
                )
            )
            for file_name, path in hook_files.items():
                file_records[file_name] = describe_file(path, file_name, threads=1)
                self._store.fs.put_file(str(path), self._join_path(file_name))
        self._drop_scratch()
        return file_records

    def _upload_file(self, file_name: str, blob: Blob) -> FileRecord:
        devices = devices_of(
            [segment for segment in blob.segments if not isinstance(segment, bytes)]
        )
        host_buffer = HostBuffer(bool(devices))
        segment_offsets = segment_starts(blob)
        chunk_sums = []
        with self._store.fs.open(self._join_path(file_name), "wb") as remote_file:
            for start in range(0, blob.size, CHUNK_BYTES):
                chunk_hash = xxhash.xxh3_64()
                for view in host_views(
                    blob,
                    start,
                    min(start + CHUNK_BYTES, blob.size),
                    segment_offsets,
                    host_buffer,
                ):
                    chunk_hash.update(view)
                    remote_file.write(view)
                chunk_sums.append(chunk_hash.hexdigest())
        return FileRecord(name=file_name, size=blob.size, sums=tuple(chunk_sums))

    def _list_hook_files(self, files: Mapping[str, Blob]) -> dict[str, Path]:
        """Return the files of hooks in the local folder, by name."""
        hook_files: dict[str, Path] = {}
        for path in sorted(self.folder.rglob("*")) if self._scratch is not None else ():
            file_name = path.relative_to(self.folder).as_posix()
            if file_name in files:
                log.warning(
                    "%s, which a save hook wrote, is replaced by the file of that name this save writes",
                    file_name,
                )
            elif not path.is_dir() or path.is_symlink():
                hook_files[file_name] = check_hooked(self.folder, file_name)
        return hook_files

    def hook_files(self, written_names: Sequence[str]) -> list[FileRecord]:
        """Return an empty list: every rank's `put` has uploaded the files of its hooks."""
        return []

    def commit(self, manifest: Manifest) -> None:
        """Upload the manifest, which makes the checkpoint visible, and remove the earlier checkpoint of this name."""
        remote_sizes = self._store.sizes(self.name)
        for file in manifest.files:
            remote_size = remote_sizes.get(f"{self.token}/{file.name}")
            if remote_size != file.size:
                raise CheckpointError(
                    f"{file.name} is at {self._store.address}/{self.name} with {remote_size or 'none'} of {file.size} bytes, so the "
                    "checkpoint was not committed. Save again; look at the storage service if it happens again."
                )
        outdated_names = {
            *self._store.listed_files(self.name),
            f"{self.token}/{_RESERVATION_FILE}",
        } & remote_sizes.keys()
        placed_manifest = msgspec.structs.replace(
            manifest, notes={**manifest.notes, _FOLDER_NOTE: self.token}
        )
        self._store.fs.pipe_file(
            self._store.join_path(self.name, MANIFEST_NAME),
            encode_manifest(placed_manifest),
        )
        self._store.remove(self.name, sorted(outdated_names))

    def _drop_scratch(self) -> None:
        if self._scratch is not None:
            self._scratch.cleanup()
            self._scratch = None

    def abort(self) -> None:
        """Remove the uploaded files."""
        self._drop_scratch()
        uploaded_names = []
        for file_name in self._store.sizes(self.name):
            if file_name.startswith(f"{self.token}/"):
                uploaded_names.append(file_name)
        self._store.remove(self.name, uploaded_names)


class RemoteStore:
    """Checkpoints as folders under one URL of any file system that fsspec supports."""

    def __init__(
        self,
        url: str,
        **options: Any,  # Any: options of the file system (keys, endpoints)
    ) -> None:
        fsspec = need("fsspec", why=f"checkpoints at {url}")
        self.fs, self._root = fsspec.core.url_to_fs(url.rstrip("/"), **options)
        self._url = url.rstrip("/")

    @property
    def address(self) -> str:
        return self._url

    @property
    def remote(self) -> bool:
        return True

    def join_path(self, *path_parts: str) -> str:
        """Return a path inside the store, in the file system's notation."""
        return "/".join((self._root.rstrip("/"), *path_parts))

    def begin(self, name: str) -> RemoteDraft:
        """Return a new draft, after removing abandoned ones of this name. Other files are never touched."""
        with self._explaining_start(name):
            self._remove_abandoned(name)
            return self._new_draft(name)

    def begin_numbered(self, at_least: int) -> RemoteDraft:
        """Return a new draft with the next free number, which no other process gets.

        A file reserves the number. Of processes that reserve one at the same moment each finds the other's file, and all
        of them try again; the storage service must list a file as soon as it has been written, as S3, GCS and Azure do.
        """
        with self._explaining_start(numbered_checkpoint(at_least)):
            for name in set(self._list_folders()) - set(self.names()):
                if checkpoint_number(name) is not None:
                    self._remove_abandoned(name)
            while True:
                next_name = numbered_checkpoint(
                    next_number(self._list_folders(), at_least)
                )
                draft = self._new_draft(next_name)
                reservation = f"{draft.token}/{_RESERVATION_FILE}"
                self.fs.pipe_file(self.join_path(draft.name, reservation), b"")
                if set(self.sizes(draft.name)) == {reservation}:
                    return draft
                self.remove(draft.name, [reservation])
                # not from the generators that training uses
                time.sleep(random.SystemRandom().uniform(0.01, 0.1))

    def _new_draft(self, name: str) -> RemoteDraft:
        version = f"v-{int(time.time()):08x}-{secrets.token_hex(6)}"
        protocol = self.fs.protocol
        protocols = (protocol,) if isinstance(protocol, str) else protocol
        if not _OBJECT_STORE_PROTOCOLS.intersection(protocols):
            self.fs.makedirs(self.join_path(name, version), exist_ok=True)
        return RemoteDraft(self, name, version)

    @contextmanager
    def _explaining_start(self, name: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise CheckpointError(
                f"cannot start the checkpoint {name!r} at {self._url}: {error}. Nothing was changed. Check the URL and "
                "the credentials of the storage service."
            ) from error

    def _remove_abandoned(self, name: str) -> None:
        """Remove files of saves that were started a day ago and have not been committed."""
        listed_names = self.listed_files(name)
        abandoned_names = []
        for file_name in self.sizes(name):
            version_match = _VERSION_FOLDER.match(file_name)
            if (
                version_match
                and file_name not in listed_names
                and time.time() - int(version_match[1], 16) > _ABANDONED_AFTER_S
            ):
                abandoned_names.append(file_name)
        self.remove(name, abandoned_names)

    def join(self, name: str, token: str) -> RemoteDraft:
        """Return the draft that main started: a URL is visible to every process."""
        return RemoteDraft(self, name, token)

    def _list_folders(self) -> list[str]:
        self.fs.invalidate_cache()
        if not self.fs.exists(self._root):
            return []
        folder_entries = self.fs.ls(self._root, detail=True)
        return [
            str(folder_entry["name"]).rstrip("/").rpartition("/")[2]
            for folder_entry in folder_entries
            if folder_entry["type"] == "directory"
        ]

    def sizes(self, name: str) -> dict[str, int]:
        """Return the sizes of all files in the folder of a checkpoint, by name, from one listing."""
        self.fs.invalidate_cache()
        base_path = self.join_path(name)
        if not self.fs.exists(base_path):
            return {}
        prefix = str(self.fs._strip_protocol(base_path)).rstrip("/") + "/"
        remote_sizes = {}
        for remote_path, file_entry in self.fs.find(base_path, detail=True).items():
            remote_sizes[str(remote_path).removeprefix(prefix)] = int(
                file_entry["size"]
            )
        return remote_sizes

    def listed_files(self, name: str) -> list[str]:
        """Return the files of the committed checkpoint of this name; empty when there is no readable manifest."""
        try:
            manifest = self.manifest(name)
            return [_placed_path(manifest, file) for file in manifest.files]
        except CheckpointError:  # missing or damaged: no file is known to belong to it
            return []

    def remove(self, name: str, files: Sequence[str]) -> None:
        """Delete files of a checkpoint."""
        if files:
            self.fs.rm([self.join_path(name, file) for file in files])

    def names(self) -> list[str]:
        """Return the names of the folders with a manifest."""
        return sorted(
            folder_name
            for folder_name in self._list_folders()
            if self.fs.exists(self.join_path(folder_name, MANIFEST_NAME))
        )

    def manifest(self, name: str) -> Manifest:
        """Return the verified manifest."""
        manifest_path = self.join_path(name, MANIFEST_NAME)
        manifest_url = f"{self._url}/{name}/{MANIFEST_NAME}"
        try:
            if self.fs.size(manifest_path) > MAX_MANIFEST_BYTES:
                raise CorruptCheckpointError(
                    f"{manifest_url}: larger than any manifest. Use another checkpoint."
                )
            return decode_manifest(self.fs.cat_file(manifest_path), manifest_url)
        except FileNotFoundError as error:
            raise IncompleteCheckpointError(
                f"{manifest_url} does not exist, so there is no complete checkpoint at {self._url}/{name}. Give another URL."
            ) from error
        except OSError as error:
            raise CheckpointError(
                f"{manifest_url} cannot be read: {error}. Check the URL and the credentials."
            ) from error

    def check(self, name: str) -> Manifest:
        """Return the manifest after checking that every file has its size. Raises: a CheckpointError otherwise."""
        manifest = self.manifest(name)
        remote_sizes = self.sizes(name)
        missing_names = []
        for file in manifest.files:
            if remote_sizes.get(_placed_path(manifest, file)) != file.size:
                missing_names.append(file.name)
        if missing_names:
            raise IncompleteCheckpointError(
                f"{self._url}/{name}: {', '.join(missing_names[:4])} of {len(manifest.files)} files are missing or have another size, so it is "
                "not complete. Load an earlier checkpoint, or delete this one."
            )
        return manifest

    def is_current(
        self, name: str, manifest: Manifest, folder: Path | None = None
    ) -> bool:
        """Return True if the checkpoint has not been replaced since its manifest was read."""
        try:
            return self.manifest(name) == manifest
        except CheckpointError:
            return False

    @contextmanager
    def fetch(self, name: str, manifest: Manifest) -> Iterator[Path]:
        """Context manager that downloads the files into a temporary folder, several at a time."""
        with tempfile.TemporaryDirectory(prefix="hasten-fetch-") as scratch_path:
            folder = Path(scratch_path)
            self._check_room(name, folder, manifest.num_bytes)
            remote_sizes = self.sizes(name)
            for file in manifest.files:
                remote_size = remote_sizes.get(_placed_path(manifest, file), 0)
                if remote_size > file.size:
                    raise CorruptCheckpointError(
                        f"{self._url}/{name}: {file.name} has {remote_size} bytes instead of {file.size}, so it was replaced after it "
                        "was saved. Nothing was downloaded. Load another checkpoint."
                    )

            def download_file(file: FileRecord) -> None:
                target = resolve_inside(folder, safe_name(file.name, self._url))
                target.parent.mkdir(parents=True, exist_ok=True)
                try:
                    self.fs.get_file(
                        self.join_path(name, _placed_path(manifest, file)), str(target)
                    )
                except FileNotFoundError as error:
                    raise IncompleteCheckpointError(
                        f"{self._url}/{name}: {file.name} is missing. Nothing was loaded. Load another checkpoint."
                    ) from error

            with worker_pool("hasten-download") as thread_pool:
                list(thread_pool.map(download_file, manifest.files))
            yield folder

    def _check_room(self, name: str, folder: Path, num_bytes: int) -> None:
        disk_usage = shutil.disk_usage(folder)
        if num_bytes > disk_usage.free:
            raise CheckpointError(
                f"{self._url}/{name} has {num_bytes / 1e6:,.1f} MB to download and the disk of {folder.parent} has "
                f"{disk_usage.free / 1e6:,.1f} MB free. Nothing was loaded. Free space there, or set TMPDIR to a folder on a larger "
                "disk."
            )

    def delete(self, name: str) -> None:
        """Remove the manifest first, so that no reader sees an incomplete checkpoint, then the other files."""
        self.remove(name, [MANIFEST_NAME])
        self.remove(name, list(self.sizes(name)))
        if self.fs.exists(self.join_path(name)):
            self.fs.rm(self.join_path(name), recursive=True)


def _placed_path(manifest: Manifest, file: FileRecord) -> str:
    """Return the path of a file below the checkpoint's URL."""
    folder = str(manifest.notes.get(_FOLDER_NOTE, ""))
    if _VERSION_FOLDER.fullmatch(f"{folder}/"):
        return f"{folder}/{file.name}"
    return file.name
