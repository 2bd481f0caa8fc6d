"""Checkpoints at any fsspec URL: files first, the manifest last; a checkpoint exists once its manifest does."""

from __future__ import annotations

import logging
import re
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
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
    decode,
    encode,
    inside,
    safe_name,
)
from hasten.checkpoint.store.disk import HostBuffer, default_threads, devices_of, host_views, segment_starts
from hasten.checkpoint.store.local_store import check_hooked, described, is_automatic, same_family
from hasten.checkpoint.store.locks import (
    FoundLock,
    Hidden,
    Liveness,
    LockTimeouts,
    Owner,
    WriterLock,
    acquire,
    decode_owner,
    encode_owner,
    hidden,
    is_dead,
    liveness,
    parse_hidden,
    tag_of,
    this_process,
)
from hasten.errors import CheckpointBusyError, CheckpointError, CorruptCheckpointError, IncompleteCheckpointError
from hasten.optional import need

log = logging.getLogger(__name__)
_VERSION: Final = re.compile(r"v-[0-9a-f]{12}/")
"""Subfolder for the files of a save when the folder is not empty."""
_OBJECTS: Final = frozenset({"s3", "s3a", "gs", "gcs", "abfs", "az", "adl", "oss", "oci"})
"""Object stores have no folders; making one there could accidentally create a bucket."""


class RemoteDraft:
    """A checkpoint being uploaded; a second save under one name uploads next to the first and replaces its manifest.

    The process that started the draft holds the `lock`; processes that join it have none.
    """

    def __init__(self, store: RemoteStore, name: str, token: str, lock: WriterLock | None = None) -> None:
        self._store = store
        self._name = name
        self._token = token
        self._lock = lock
        self._scratch: tempfile.TemporaryDirectory[str] | None = None

    @property
    def name(self) -> str:
        return self._name

    @property
    def token(self) -> str:
        return self._token

    @property
    def folder(self) -> Path:
        """Local folder for hooks; its files are uploaded by `put`."""
        if self._scratch is None:
            self._scratch = tempfile.TemporaryDirectory(prefix="hasten-hooks-")
        folder = Path(self._scratch.name) / self._name
        folder.mkdir(exist_ok=True)
        return folder

    def _placed(self, file: str) -> str:
        prefix = self._token.partition(":")[2]
        return f"{prefix}/{file}" if prefix else file

    def _path(self, file: str) -> str:
        return self._store.join_path(self._name, self._placed(file))

    def put(self, files: Mapping[str, Blob]) -> dict[str, FileRecord]:
        """Upload files, and those of hooks in this rank's local folder, in parallel; return records with checksums."""
        own = self._hooked(files)
        with ThreadPoolExecutor(default_threads(), thread_name_prefix="hasten-upload") as pool:
            records = dict(zip(files, pool.map(lambda item: self._upload(*item), files.items()), strict=True))
            records |= dict(zip(own, pool.map(lambda item: self._upload_file(*item), own.items()), strict=True))
        self._drop_scratch()
        return records

    def _upload(self, file: str, blob: Blob) -> FileRecord:
        devices = devices_of([segment for segment in blob.segments if not isinstance(segment, bytes)])
        buffer, starts, sums = HostBuffer(bool(devices)), segment_starts(blob), []
        with self._store.fs.open(self._path(file), "wb") as out:
            for start in range(0, blob.size, CHUNK_BYTES):
                total = xxhash.xxh3_64()
                for view in host_views(blob, start, min(start + CHUNK_BYTES, blob.size), starts, buffer):
                    total.update(view)
                    out.write(view)
                sums.append(total.hexdigest())
        return FileRecord(name=self._placed(file), size=blob.size, sums=tuple(sums))

    def _hooked(self, files: Mapping[str, Blob]) -> dict[str, Path]:
        """Return the files of hooks in the local folder, by name."""
        found: dict[str, Path] = {}
        for path in sorted(self.folder.rglob("*")) if self._scratch is not None else ():
            name = path.relative_to(self.folder).as_posix()
            if name in files:
                log.warning("%s, which a save hook wrote, is replaced by the file of that name this save writes", name)
            elif not path.is_dir() or path.is_symlink():
                found[name] = check_hooked(self.folder, name)
        return found

    def _upload_file(self, file: str, path: Path) -> FileRecord:
        record = described(path, self._placed(file), threads=1)
        self._store.fs.put_file(str(path), self._path(file))
        return record

    def hook_files(self, known: Sequence[str]) -> list[FileRecord]:
        """Return an empty list: every rank's `put` has uploaded the files of its hooks."""
        return []

    def commit(self, manifest: Manifest) -> None:
        """Upload the manifest, which makes the checkpoint visible."""
        self._check_arrived(manifest)
        if self._lock is not None:
            self._lock.check(f"{self._store.address}/{self._name}")
        path = self._store.join_path(self._name, MANIFEST_NAME)
        before, previous = self._store.listed_files(self._name), self._store.raw_manifest(self._name)
        self._store.fs.pipe_file(path, encode(manifest))
        try:
            self._check_arrived(manifest)
        except CheckpointError:
            if previous is None:
                self._store.remove(self._name, [MANIFEST_NAME])
            else:
                self._store.fs.pipe_file(path, previous)
            raise
        kept = {file.name for file in manifest.files}
        self._store.remove(self._name, [file for file in before if file not in kept])
        self._release()

    def _check_arrived(self, manifest: Manifest) -> None:
        sizes = self._store.sizes(self._name)
        for file in manifest.files:
            if (size := sizes.get(file.name)) != file.size:
                raise CheckpointError(
                    f"{file.name} is at {self._store.address}/{self._name} with {size or 'none'} of {file.size} bytes, so the "
                    "checkpoint was not committed. Save again; look at the storage service if it happens again."
                )

    def _drop_scratch(self) -> None:
        if self._scratch is not None:
            self._scratch.cleanup()
            self._scratch = None

    def _release(self) -> None:
        if self._lock is not None:
            self._lock.release()

    def abort(self) -> None:
        """Remove the uploaded files, unless another process owns the checkpoint by now."""
        self._drop_scratch()
        try:
            if self._lock is None or self._lock.held():
                prefix = self._token.partition(":")[2]  # empty if the folder was empty when the draft was started
                self._store.sweep(self._name, re.compile(re.escape(prefix) + "/") if prefix else None)
        finally:
            self._release()


class RemoteStore:
    """Checkpoints as folders under one URL of any file system that fsspec supports."""

    def __init__(
        self,
        url: str,
        *,
        timeouts: LockTimeouts | None = None,
        here: Owner | None = None,
        **options: Any,  # Any: options of the file system (keys, endpoints)
    ) -> None:
        fsspec = need("fsspec", why=f"checkpoints at {url}")
        self.fs, self._root = fsspec.core.url_to_fs(url.rstrip("/"), **options)
        self._url = url.rstrip("/")
        self._timeouts = timeouts
        self._here = here

    @property
    def address(self) -> str:
        return self._url

    @property
    def remote(self) -> bool:
        return True

    def join_path(self, *parts: str) -> str:
        """Return a path inside the store, in the file system's notation."""
        return "/".join((self._root.rstrip("/"), *parts))

    def begin(self, name: str) -> RemoteDraft:
        """Return a new draft. Existing files are never touched; new ones are stored next to them.

        Only an automatically numbered folder belongs to hasten alone; files in it that no manifest lists are removed.

        Raises: CheckpointBusyError when another process writes this checkpoint.
        """
        try:
            if self._has_folders():
                self.fs.makedirs(self.join_path(name), exist_ok=True)
            lock = acquire(self._locks(), name, f"{self._url}/{name}")
            try:
                self.sweep(name, None if is_automatic(name) else _VERSION)
                self._clear_dead(name)
                taken = bool(self.sizes(name))
            except BaseException:
                lock.release()
                raise
        except OSError as error:
            raise CheckpointError(
                f"cannot start the checkpoint {name!r} at {self._url}: {error}. Nothing was changed. Check the URL and "
                "the credentials of the storage service."
            ) from error
        return RemoteDraft(self, name, f"{lock.token}:v-{lock.token}" if taken else f"{lock.token}:", lock)

    def _locks(self) -> RemoteLocks:
        return RemoteLocks(self.fs, self._root, self._timeouts, self._here)

    def _has_folders(self) -> bool:
        return not _OBJECTS.intersection((self.fs.protocol,) if isinstance(self.fs.protocol, str) else self.fs.protocol)

    def _clear_dead(self, name: str) -> None:
        """Remove leftovers of dead processes, for this checkpoint and for others numbered like it."""
        locks, locked = self._locks(), set[str]()
        for entry in locks.entries():
            lock = locks.lock_at(entry.tag, entry.token) if same_family(name, entry.tag) else None
            if lock is not None and is_dead(locks, entry.tag, lock):
                locks.remove(entry.tag, entry.token)
            else:
                locked.add(entry.tag)
        for other in self._folders():
            unowned = other != name and same_family(name, other) and other not in locked
            if unowned and not self.fs.exists(self.join_path(other, MANIFEST_NAME)):
                self._sweep_unlocked(other)

    def _sweep_unlocked(self, name: str) -> None:
        try:
            lock = acquire(self._locks(), name, f"{self._url}/{name}")
        except CheckpointBusyError:  # another process has just started to write it
            return
        try:
            self.sweep(name)
        finally:
            lock.release()

    def join(self, name: str, token: str) -> RemoteDraft:
        """Return the draft that main started: a URL is visible to every process."""
        return RemoteDraft(self, name, token)

    def _folders(self) -> list[str]:
        self.fs.invalidate_cache()
        if not self.fs.exists(self._root):
            return []
        entries = self.fs.ls(self._root, detail=True)
        return [str(e["name"]).rstrip("/").rpartition("/")[2] for e in entries if e["type"] == "directory"]

    def sizes(self, name: str) -> dict[str, int]:
        """Return the sizes of all files in the folder of a checkpoint, by name, from one listing."""
        self.fs.invalidate_cache()
        base = self.join_path(name)
        if not self.fs.exists(base):
            return {}
        prefix = str(self.fs._strip_protocol(base)).rstrip("/") + "/"
        return {str(p).removeprefix(prefix): int(e["size"]) for p, e in self.fs.find(base, detail=True).items()}

    def raw_manifest(self, name: str) -> bytes | None:
        """Return the encoded manifest; None when there is none."""
        try:
            return bytes(self.fs.cat_file(self.join_path(name, MANIFEST_NAME)))
        except FileNotFoundError:
            return None

    def listed_files(self, name: str) -> list[str]:
        """Return the files of the committed checkpoint of this name; empty when there is no readable manifest."""
        try:
            return [file.name for file in self.manifest(name).files]
        except CheckpointError:  # missing or damaged: no file is known to belong to it
            return []

    def sweep(self, name: str, which: re.Pattern[str] | None = None) -> None:
        """Remove files that no manifest lists, all or those matching `which`: leftovers of interrupted saves."""
        listed = {*self.listed_files(name), MANIFEST_NAME}
        unlisted = [file for file in self.sizes(name) if file not in listed]
        self.remove(name, [file for file in unlisted if which is None or which.match(file)])

    def remove(self, name: str, files: Sequence[str]) -> None:
        """Delete files of a checkpoint."""
        if files:
            self.fs.rm([self.join_path(name, file) for file in files])

    def names(self) -> list[str]:
        """Return the names of the folders with a manifest."""
        return sorted(n for n in self._folders() if self.fs.exists(self.join_path(n, MANIFEST_NAME)))

    def manifest(self, name: str) -> Manifest:
        """Return the verified manifest."""
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
        """Return True if the manifest is readable and every file exists with its size."""
        try:
            manifest = self.manifest(name)
            return all(self.fs.size(self.join_path(name, file.name)) == file.size for file in manifest.files)
        except (CheckpointError, OSError):  # loading it by name reports the problem
            return False

    @contextmanager
    def fetch(self, name: str, files: Sequence[FileRecord]) -> Iterator[Path]:
        """Context manager that downloads the files into a temporary folder, several at a time."""
        with tempfile.TemporaryDirectory(prefix="hasten-fetch-") as scratch:
            folder = Path(scratch)
            self._check_room(name, folder, sum(file.size for file in files))
            there = self.sizes(name)
            for file in files:
                if there.get(file.name, 0) > file.size:
                    raise CorruptCheckpointError(
                        f"{self._url}/{name}: {file.name} has {there[file.name]} bytes instead of {file.size}, so it was replaced after it "
                        "was saved. Nothing was downloaded. Load another checkpoint."
                    )

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

    def _check_room(self, name: str, folder: Path, num_bytes: int) -> None:
        usage = shutil.disk_usage(folder)
        if num_bytes > usage.free:
            raise CheckpointError(
                f"{self._url}/{name} has {num_bytes / 1e6:,.1f} MB to download and the disk of {folder.parent} has "
                f"{usage.free / 1e6:,.1f} MB free. Nothing was loaded. Free space there, or set TMPDIR to a folder on a larger "
                "disk."
            )

    def delete(self, name: str) -> None:
        """Remove the manifest first, so that no reader sees an incomplete checkpoint, then the other files.

        Raises: CheckpointBusyError when another process writes it.
        """
        lock = acquire(self._locks(), name, f"{self._url}/{name}")
        try:
            self.remove(name, [MANIFEST_NAME])
            self.remove(name, list(self.sizes(name)))
            if self.fs.exists(self.join_path(name)):
                self.fs.rm(self.join_path(name), recursive=True)
        finally:
            lock.release()


class RemoteLocks:
    """Lock files under one URL."""

    def __init__(
        self,
        fs: Any,  # Any: an fsspec file system, which has no types
        root: str,
        timeouts: LockTimeouts | None = None,
        here: Owner | None = None,
    ) -> None:
        self._fs = fs
        self._root = root.rstrip("/")
        self.timeouts = timeouts or LockTimeouts()
        self.here = here or this_process()

    def _path(self, name: str, token: str) -> str:
        return f"{self._root}/{hidden('lock', name, token)}"

    def create(self, name: str, token: str) -> WriterLock:
        """Create a lock of this process."""
        fs, path, beats = self._fs, self._path(name, token), iter(range(1, 2**62))
        owner = self.here
        fs.pipe_file(path, encode_owner(owner))

        def exists() -> bool:
            fs.invalidate_cache()
            return bool(fs.exists(path))

        def renew() -> bool:
            if not exists():  # considered dead by another process: writing it again would make two owners
                return False
            fs.pipe_file(path, encode_owner(msgspec.structs.replace(owner, beat=next(beats), beat_s=time.time())))
            return True

        def remove() -> None:
            if exists():
                fs.rm_file(path)

        return WriterLock(token, exists, remove, renew)

    def entries(self) -> list[Hidden]:
        """Return all locks under the URL, from one listing."""
        self._fs.invalidate_cache()
        try:
            names = [str(entry["name"]).rpartition("/")[2] for entry in self._fs.ls(self._root, detail=True)]
        except FileNotFoundError:
            return []
        return [entry for entry in map(parse_hidden, names) if entry is not None and entry.what == "lock"]

    def found(self, name: str, own: str = "") -> list[FoundLock]:
        """Return all locks of a checkpoint, except the one with the token `own`."""
        tag = tag_of(name)
        tokens = [entry.token for entry in self.entries() if entry.tag == tag and entry.token != own]
        locks = (self.lock_at(name, token) for token in tokens)
        return [lock for lock in locks if lock is not None]

    def lock_at(self, name: str, token: str) -> FoundLock | None:
        """Return the lock of one save; None when it does not exist."""
        try:
            owner = decode_owner(self._fs.cat_file(self._path(name, token)))
        except FileNotFoundError:
            return None
        return FoundLock(token, owner, (owner.beat_s, owner.beat))

    def liveness(self, name: str, lock: FoundLock) -> Liveness:
        """Return the liveness of the owner, which is unknown unless it is a process of this machine."""
        return liveness(lock.owner, self.here)

    def remove(self, name: str, token: str) -> None:
        """Delete the lock of a dead owner."""
        try:
            self._fs.rm_file(self._path(name, token))
        except FileNotFoundError:  # another process deleted it first
            return
