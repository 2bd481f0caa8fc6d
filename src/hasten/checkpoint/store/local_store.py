"""Checkpoints in a folder: hidden drafts with a lock, made visible by one rename; a crash at any point loses nothing."""

from __future__ import annotations

import errno
import logging
import re
import stat
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from operator import attrgetter
from pathlib import Path

from hasten.checkpoint.base import Blob
from hasten.checkpoint.format.manifest import (
    CHUNK_BYTES,
    MANIFEST_NAME,
    MAX_MANIFEST_BYTES,
    FileRecord,
    Manifest,
    absent,
    decode,
    encode,
    inside,
    read_manifest,
    read_outside,
)
from hasten.checkpoint.store.disk import FULL, Disk, cannot_write, default_threads, file_checksum, write_files
from hasten.checkpoint.store.folder_replacement import FolderReplacement, draft_of, home, missing, points_to
from hasten.checkpoint.store.locks import (
    Hidden,
    LocalLocks,
    LockTimeouts,
    Owner,
    WriterLock,
    acquire,
    hidden,
    hidden_entries,
    is_dead,
    tag_of,
)
from hasten.errors import CheckpointError, IncompleteCheckpointError

log = logging.getLogger(__name__)
_AUTOMATIC = re.compile(r"checkpoint_\d+")


def is_automatic(name: str) -> bool:
    """Return True if save_state generated the name, so that its folder belongs to hasten alone."""
    return _AUTOMATIC.fullmatch(name) is not None


def same_family(name: str, other: str) -> bool:
    """Return True if a save of `name` removes leftovers of `other`: the same name, or both numbered automatically."""
    return name == other or (is_automatic(name) and is_automatic(other))


class LocalDraft:
    """Hidden folder, next to the checkpoint it will become or inside the folder whose content it will replace.

    The files are in a subfolder that already has the checkpoint's name, which is the folder hooks see. The process
    that started the draft holds the `lock`; processes that join it have none.
    """

    def __init__(
        self,
        target: Path,
        token: str,
        disk: Disk,
        threads: int | None = None,
        *,
        within: bool = False,
        lock: WriterLock | None = None,
        locks: Callable[[Path], LocalLocks] | None = None,
        keeps_exports: bool = True,
    ) -> None:
        self.name = target.name
        self.token = token
        self._target = target
        self._disk = disk
        self._threads = threads
        self._lock = lock
        self._keeps_exports = keeps_exports
        self._locks = locks or partial(LocalLocks, disk=disk)
        self._base = target if within else target.parent
        self._draft = self._base / hidden("draft", self.name, token)
        self.folder = self._draft / self.name

    def put(self, files: Mapping[str, Blob]) -> dict[str, FileRecord]:
        """Write files in parallel; they are on the disk when this returns."""
        with self._naming_the_disk(sum(map(attrgetter("size"), files.values()))):
            self._disk.make_folder(self.folder)  # a hook may have removed it
            for name in files:
                path = self.folder / name
                if path.is_symlink() or path.exists():
                    log.warning(
                        "%s, which a save hook wrote, is replaced by the file of that name this save writes", name
                    )
                    self._disk.remove_tree(path) if path.is_dir() else self._disk.remove_file(path)
            return write_files(self.folder, files, self._disk, self._threads)

    def hook_files(self, known: Sequence[str]) -> list[FileRecord]:
        """Return the records of files that hooks created in the draft, after syncing them."""
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
        """Write the manifest, sync, and rename the folder to its final name or replace the existing content."""
        raw = encode(manifest)
        with self._naming_the_disk(len(raw)):
            write_files(self.folder, {MANIFEST_NAME: Blob([raw], len(raw))}, self._disk, threads=1)
            for folder in (self.folder, self._draft, self._base):
                self._disk.sync_folder(folder)
            if names := absent(self.folder, manifest.files):
                raise missing(self._target, names)
            if self._lock is not None:
                self._lock.check(str(self._target))
            if self._base == self._target or not self._rename_to_target(manifest):
                self._move_within()
                replacement = FolderReplacement(self._target, self._draft, self.folder, self._disk)
                replacement.commit(manifest, self._keeps_exports)
                replacement.clean_up()
        if self._lock is not None:
            self._lock.release()

    def _rename_to_target(self, manifest: Manifest) -> bool:
        """Rename the draft to the checkpoint; return False when a folder of that name has appeared meanwhile."""
        # A process that finds the folder looks for locks inside it, so the draft contains a lock.
        lock = hidden("lock", self.name, self.token)
        inner = self._locks(self.folder).create(self.name, self.token)
        try:
            if self._target.exists():
                return False
            try:
                self._disk.rename(self.folder, self._target)
            except OSError as error:
                if error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.EBUSY):
                    return False
                raise
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

    def _move_within(self) -> None:
        """Move the draft into the folder whose content it will replace, and take that folder's lock."""
        if self._base == self._target:
            return
        lock = acquire(self._locks(self._target), self.name, str(self._target))
        outer, moved = self._lock, self._target / hidden("draft", self.name, lock.token)
        self._lock, self.token = lock, lock.token
        try:
            self._disk.rename(self._draft, moved)
        except BaseException:
            self._lock = outer
            lock.release()
            raise
        self._base, self._draft, self.folder = self._target, moved, moved / self.name
        self._disk.sync_folder(self._base)
        if outer is not None:
            outer.release()

    def abort(self) -> None:
        """Delete the draft, unless it has become the checkpoint: then the next save completes the replacement."""
        try:
            if self._base != self._target or not points_to(self._target, self._draft):
                self._disk.remove_tree(self._draft)
        finally:
            if self._lock is not None:
                self._lock.release()

    @contextmanager
    def _naming_the_disk(self, num_bytes: int) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if error.errno not in FULL:
                raise
            raise cannot_write(f"the checkpoint {self.name!r}", self._base, num_bytes, error) from error


def check_hooked(folder: Path, name: str) -> Path:
    """Return the path of a file that a hook created in the draft, if it can be part of a checkpoint.

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
    """Return the record of an existing file."""
    size = path.stat().st_size
    starts = range(0, size, CHUNK_BYTES)
    with ThreadPoolExecutor(threads or default_threads()) as pool:
        sums = tuple(pool.map(lambda start: file_checksum(path, start, min(start + CHUNK_BYTES, size)), starts))
    return FileRecord(name=name, size=size, sums=sums)


class LocalStore:
    """Checkpoints as folders of `root`, which all ranks of a machine share.

    Hidden entries belong to the process that holds the lock with their token; if it is dead, they are leftovers.
    """

    def __init__(
        self,
        root: str | Path,
        disk: Disk | None = None,
        threads: int | None = None,
        *,
        timeouts: LockTimeouts | None = None,
        here: Owner | None = None,
    ) -> None:
        self._root = Path(root).expanduser().absolute()
        self.address = str(self._root)
        self.remote = False
        self._disk = disk or Disk()
        self._threads = threads
        self._timeouts = timeouts
        self._here = here
        self.keeps_exports = True
        """False if drafts may replace an exported model."""

    def path(self, name: str) -> Path:
        """Return the folder of a checkpoint."""
        return self._root / name

    def _locks(self, folder: Path) -> LocalLocks:
        return LocalLocks(folder, self._disk, self._timeouts, self._here)

    def begin(self, name: str) -> LocalDraft:
        """Return a new draft, after removing leftovers of dead processes for this checkpoint.

        An existing folder is never moved: the draft is created inside it, and its content is replaced.
        Raises: CheckpointBusyError when another process writes this checkpoint.
        """
        target = self._root / name
        try:
            while True:
                if target.is_file():
                    raise NotADirectoryError(f"{target} is a file")
                within = target.is_dir()
                if not within:
                    self._disk.make_folder(self._root)
                lock = acquire(self._locks(target if within else self._root), name, str(target))
                try:
                    if target.is_dir() == within:
                        self.recover(name, lock.token)
                        draft = LocalDraft(
                            *(target, lock.token, self._disk, self._threads),
                            within=within,
                            lock=lock,
                            locks=self._locks,
                            keeps_exports=self.keeps_exports,
                        )
                        self._disk.make_folder(draft.folder)
                        return draft
                except BaseException:
                    lock.release()
                    raise
                lock.release()  # the folder appeared or disappeared while the lock was being taken
        except OSError as error:
            raise CheckpointError(
                f"cannot start the checkpoint {name!r} in {self._root}: {error}. Nothing was changed. Give a folder "
                "that can be written to."
            ) from error

    def join(self, name: str, token: str) -> LocalDraft | None:
        """Return the draft that main started; None when this process does not see it."""
        for within in (False, True):
            draft = LocalDraft(self.path(name), token, self._disk, self._threads, within=within, locks=self._locks)
            if draft.folder.is_dir():
                return draft
        return None

    def recover(self, name: str, own: str = "") -> None:
        """Finish or undo interrupted saves of dead processes, for this checkpoint and for others numbered like it.

        Entries of a running process are not touched, nor those with the token `own`. Ranks: main only, with the lock.
        """
        target, tag = self._root / name, tag_of(name)
        try:
            inner, outer = list(hidden_entries(target)), list(hidden_entries(self._root))
        except PermissionError:  # the checkpoint's folder is inside a folder of another user
            inner, outer = list(hidden_entries(target)), []
        for path, entry in inner:
            if entry.token != own and not self._owned(target, entry):
                current = draft_of(read_manifest(target / MANIFEST_NAME))
                if entry.what == "draft" and current is not None and current.startswith(path.name + "/"):
                    FolderReplacement(target, path, target / current, self._disk).clean_up()
                else:
                    self._clear(path, entry)
        for path, entry in outer:
            ours = entry.tag == tag or same_family(name, entry.tag)
            if ours and entry.token != own and not self._owned(self._root, entry):
                self._clear(path, entry)

    def _owned(self, folder: Path, entry: Hidden) -> bool:
        """Return True if a hidden entry belongs to a process that may still run."""
        locks = self._locks(folder)
        if entry.what == "claim":  # exists only briefly, before it becomes a lock
            unfinished = locks.lock_at(folder / hidden("claim", entry.tag, entry.token), entry.token)
            return unfinished is not None and time.time() - unfinished.signature[0] < locks.timeouts.stale_s
        lock = locks.lock_at(folder / hidden("lock", entry.tag, entry.token), entry.token)
        return lock is not None and not is_dead(locks, entry.tag, lock)

    def _clear(self, path: Path, entry: Hidden) -> None:
        try:
            if entry.what in ("lock", "claim"):
                self._disk.remove_file(path)
            else:
                self._disk.remove_tree(path)
        except OSError as error:  # of another user, and harmless
            log.warning("%s, which a crash left, could not be removed: %s", path, error)

    def names(self) -> list[str]:
        """Return the names of the folders with a manifest."""
        found = set()
        for entry in self._root.iterdir() if self._root.is_dir() else []:
            if not entry.name.startswith(".hasten-") and (entry / MANIFEST_NAME).is_file():
                found.add(entry.name)
        return sorted(found)

    def folder(self, name: str) -> Path:
        """Return the folder with the checkpoint's files, also after a crash while its content was being replaced."""
        folder = self._root / name
        return home(folder) if any(folder.glob(".hasten-draft.*")) else folder

    def manifest(self, name: str) -> Manifest:
        """Return the verified manifest."""
        path = self.folder(name) / MANIFEST_NAME
        try:
            return decode(read_outside(path, MAX_MANIFEST_BYTES), str(path))
        except FileNotFoundError as error:
            raise IncompleteCheckpointError(
                f"{path} does not exist, so {path.parent} is not a complete checkpoint of hasten: it was never "
                "committed, or another tool wrote it. Give another folder, or convert it with `hasten ckpt convert`."
            ) from error
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error}. Check the folder's permissions.") from error

    def complete(self, name: str) -> bool:
        """Return True if the manifest is readable and every file exists with its size."""
        try:
            manifest = self.manifest(name)
            folder = self.folder(name)
            return all(inside(folder, file.name).stat().st_size == file.size for file in manifest.files)
        except (CheckpointError, OSError):  # loading it by name reports the problem
            return False

    @contextmanager
    def fetch(self, name: str, files: Sequence[FileRecord]) -> Iterator[Path]:
        """The checkpoint's folder: local files are read in place."""
        folder = self.folder(name)
        for file in files:
            inside(folder, file.name)
        yield folder

    def delete(self, name: str) -> None:
        """Hide the checkpoint by one rename, then remove it.

        Raises: CheckpointBusyError when another process writes it.
        """
        path = self.path(name)
        outer = acquire(self._locks(self._root), name, str(path))
        try:
            inner = acquire(self._locks(path), name, str(path))
            try:
                trash = self._root / hidden("trash", name, outer.token)
                self._disk.rename(path, trash)
                self._disk.sync_folder(self._root)
                self._disk.remove_tree(trash)
            finally:
                inner.release()
        finally:
            outer.release()
