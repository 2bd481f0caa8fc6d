"""A checkpoint being written to a folder: hidden until one rename makes it visible."""

from __future__ import annotations

import errno
import logging
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from hasten.checkpoint.base import Blob
from hasten.checkpoint.format.manifest import CHUNK_BYTES, MANIFEST_NAME, FileRecord, Manifest, encode, inside
from hasten.checkpoint.store.disk import FULL, BlobWriter, ChunkReader, Disk, cannot_write, default_threads
from hasten.checkpoint.store.inplace import Switch, absent, missing, points_to
from hasten.checkpoint.store.local_locks import LocalLocks, hidden
from hasten.checkpoint.store.writer_lock import Claim, take
from hasten.errors import CheckpointError

log = logging.getLogger(__name__)


class LocalDraft:
    """A hidden folder, beside the checkpoint it will become or inside the folder whose content it will replace.

    The files lie in a folder of it that has the checkpoint's own name already, which is what hooks see. The process that
    began the draft holds the `claim`; those that join it have none.
    """

    def __init__(
        self,
        target: Path,
        token: str,
        disk: Disk,
        threads: int | None = None,
        *,
        within: bool = False,
        claim: Claim | None = None,
        locks: Callable[[Path], LocalLocks] | None = None,
    ) -> None:
        self._target = target
        self._token = token
        self._disk = disk
        self._threads = threads
        self._claim = claim
        self._locks = locks or (lambda folder: LocalLocks(folder, disk))
        self._place(target if within else target.parent)

    def _place(self, base: Path) -> None:
        self._base = base
        self._draft = base / hidden("draft", self.name, self._token)

    @property
    def name(self) -> str:
        return self._target.name

    @property
    def token(self) -> str:
        return self._token

    @property
    def folder(self) -> Path:
        return self._draft / self.name

    def put(self, files: Mapping[str, Blob]) -> dict[str, FileRecord]:
        """Write files in parallel; they are on the disk when this returns."""
        with self._naming_the_disk(sum(blob.size for blob in files.values())):
            self._disk.make_folder(self.folder)  # a hook may have removed it
            for name in files:
                path = self.folder / name
                if path.is_symlink() or path.exists():
                    log.warning(
                        "%s, which a save hook wrote, is replaced by the file of that name this save writes", name
                    )
                    self._disk.remove_tree(path) if path.is_dir() else self._disk.remove_file(path)
            return BlobWriter(self._disk, self._threads).write(self.folder, files)

    def adopt(self, known: Sequence[str]) -> list[FileRecord]:
        """Records of files that hooks left in the draft, synced."""
        records, ours = [], set(known)
        with self._naming_the_disk(0):
            for path in sorted(self.folder.rglob("*")):
                name = path.relative_to(self.folder).as_posix()
                if path.is_dir() and not path.is_symlink():
                    self._disk.sync_folder(path)
                elif name not in ours:
                    with check_hooked(self.folder, name).open("rb") as file:
                        self._disk.sync(file.fileno())
                    records.append(described(path, name, self._threads))
        return records

    def commit(self, manifest: Manifest) -> None:
        """Write the manifest, sync, and give the folder its final name, or its content to the folder that is there."""
        raw = encode(manifest)
        with self._naming_the_disk(len(raw)):
            BlobWriter(self._disk, 1).write(self.folder, {MANIFEST_NAME: Blob([raw], len(raw))})
            for folder in (self.folder, self._draft, self._base):
                self._disk.sync_folder(folder)
            if names := absent(self.folder, manifest.files):
                raise missing(self._target, names)
            self._check_owned()
            if self._within or not self._become(manifest):
                self._move_within()
                switch = Switch(self._target, self._draft, self.folder, self._disk)
                switch.commit(manifest)
                switch.tidy()
        self._release()

    @property
    def _within(self) -> bool:
        return self._base == self._target

    def _become(self, manifest: Manifest) -> bool:
        """Turn the draft into the checkpoint; False when a folder of its name has appeared meanwhile."""
        # Whoever finds the folder there looks for locks inside it, so a lock comes along.
        lock = hidden("lock", self.name, self._token)
        inner = self._locks(self.folder).put(self.name, self._token)
        try:
            if self._target.exists() or not self._renamed():
                return False
            self._disk.sync_folder(self._base)
            if names := absent(self._target, manifest.files):
                self._disk.rename(self._target, self.folder)
                self._disk.sync_folder(self._base)
                raise missing(self._target, names)
            self._disk.remove_tree(self._draft)
            self._disk.remove_file(self._target / lock)
        finally:
            inner.release()
        return True

    def _renamed(self) -> bool:
        try:
            self._disk.rename(self.folder, self._target)
        except OSError as error:
            if error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.EBUSY):
                return False
            raise
        return True

    def _move_within(self) -> None:
        """Go on inside the folder whose content will be replaced, under its lock."""
        if self._within:
            return
        claim = take(self._locks(self._target), self.name, str(self._target))
        old, outer = self._draft, self._claim
        self._claim, self._token = claim, claim.token
        try:
            self._disk.rename(old, self._target / hidden("draft", self.name, self._token))
        except BaseException:
            self._claim = outer
            claim.release()
            raise
        self._place(self._target)
        self._disk.sync_folder(self._base)
        if outer is not None:
            outer.release()

    def _check_owned(self) -> None:
        if self._claim is not None:
            self._claim.check(str(self._target))

    def _release(self) -> None:
        if self._claim is not None:
            self._claim.release()

    def abort(self) -> None:
        """Throw the draft away, unless it has become the checkpoint: then the next save brings the rest to its end."""
        try:
            if not (self._within and points_to(self._target, self._draft)):
                self._disk.remove_tree(self._draft)
        finally:
            self._release()

    @contextmanager
    def _naming_the_disk(self, num_bytes: int) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if error.errno not in FULL:
                raise
            raise cannot_write(f"the checkpoint {self.name!r}", self._base, num_bytes, error) from error


def check_hooked(folder: Path, name: str) -> Path:
    """The path of a file that a hook left in the draft, if it can be part of a checkpoint.

    Raises: CheckpointError otherwise.
    """
    path = inside(folder, name)
    if name == MANIFEST_NAME:
        raise CheckpointError(
            f"a save hook wrote {MANIFEST_NAME}, the table of contents that every checkpoint has and hasten writes itself. "
            "Nothing was saved. Let the hook use another name."
        )
    if not stat.S_ISREG(path.stat().st_mode):
        raise CheckpointError(
            f"{name}, left by a save hook, is not a plain file, so it cannot be part of a checkpoint. Nothing was saved. "
            "Let the hook write files and folders."
        )
    return path


def described(path: Path, name: str, threads: int | None = None) -> FileRecord:
    """The record of a file that is there."""
    size = path.stat().st_size
    reader, starts = ChunkReader(), range(0, size, CHUNK_BYTES)
    with ThreadPoolExecutor(threads or default_threads()) as pool:
        sums = tuple(pool.map(lambda start: reader.checksum(path, start, min(start + CHUNK_BYTES, size)), starts))
    return FileRecord(name=name, size=size, sums=sums)
