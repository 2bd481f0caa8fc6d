"""Checkpoints in a folder: drafts have an owner, become visible atomically, and a crash at any point loses nothing."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from hasten.checkpoint.format.manifest import MANIFEST_NAME, MAX_MANIFEST_BYTES, FileRecord, Manifest, decode, inside
from hasten.checkpoint.store.disk import Disk
from hasten.checkpoint.store.local_draft import LocalDraft, Switch, draft_of, home, read_manifest
from hasten.checkpoint.store.locks import Hidden, LocalLocks, hidden, hidden_entries, tag_of
from hasten.checkpoint.store.outside_files import read_outside
from hasten.checkpoint.store.writer_lock import Owner, Patience, dead, take
from hasten.errors import CheckpointError, IncompleteCheckpointError

log = logging.getLogger(__name__)
_AUTOMATIC = re.compile(r"checkpoint_\d+")


def is_automatic(name: str) -> bool:
    """Return True if save_state generated the name, so that its folder belongs to hasten alone."""
    return _AUTOMATIC.fullmatch(name) is not None


def same_family(name: str, other: str) -> bool:
    """Return True if a save of `name` removes leftovers of `other`: the same name, or both numbered automatically."""
    return name == other or (is_automatic(name) and is_automatic(other))


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
        patience: Patience | None = None,
        here: Owner | None = None,
    ) -> None:
        self._root = Path(root).expanduser().absolute()
        self._disk = disk or Disk()
        self._threads = threads
        self._patience = patience
        self._here = here

    @property
    def address(self) -> str:
        return str(self._root)

    @property
    def remote(self) -> bool:
        return False

    def path(self, name: str) -> Path:
        """Return the folder of a checkpoint."""
        return self._root / name

    def _locks(self, folder: Path) -> LocalLocks:
        return LocalLocks(folder, self._disk, self._patience, self._here)

    def begin(self, name: str) -> LocalDraft:
        """Return a new draft, after removing leftovers of dead processes for this checkpoint.

        An existing folder is never moved: the draft is created inside it, and its content is replaced.
        Raises: CheckpointBusyError when another process writes this checkpoint.
        """
        try:
            return self._begin(name)
        except OSError as error:
            raise CheckpointError(
                f"cannot start the checkpoint {name!r} in {self._root}: {error}. Nothing was changed. Give a folder "
                "that can be written to."
            ) from error

    def _begin(self, name: str) -> LocalDraft:
        target = self.path(name)
        if target.is_file():
            raise NotADirectoryError(f"{target} is a file")
        within = target.is_dir()
        if not within:
            self._disk.make_folder(self._root)
        claim = take(self._locks(target if within else self._root), name, str(target))
        try:
            if target.is_dir() != within:  # the folder appeared or disappeared while the lock was being taken
                claim.release()
                return self._begin(name)
            self.recover(name)
            draft = LocalDraft(
                *(target, claim.token, self._disk, self._threads), within=within, claim=claim, locks=self._locks
            )
            self._disk.make_folder(draft.folder)
        except BaseException:
            claim.release()
            raise
        return draft

    def join(self, name: str, token: str) -> LocalDraft | None:
        """Return the draft that main started; None when this process does not see it."""
        for within in (False, True):
            draft = LocalDraft(self.path(name), token, self._disk, self._threads, within=within, locks=self._locks)
            if draft.folder.is_dir():
                return draft
        return None

    def recover(self, name: str) -> None:
        """Finish or undo interrupted saves of dead processes, for this checkpoint and for others numbered like it.

        Entries of a running process are not touched. Ranks: main only, with the claim on `name`.
        """
        self._recover_within(self.path(name))
        try:
            leftovers = [(path, entry) for path, entry in hidden_entries(self._root) if self._may_clear(name, entry)]
        except PermissionError:  # the checkpoint's folder is inside a folder of another user
            return
        for path, entry in leftovers:
            if not self._owned(self._root, entry):
                self._clear(path, entry)

    def _may_clear(self, name: str, entry: Hidden) -> bool:
        return entry.tag == tag_of(name) or same_family(name, entry.tag)

    def _owned(self, folder: Path, entry: Hidden) -> bool:
        """Return True if a hidden entry belongs to a process that may still run."""
        locks = self._locks(folder)
        if entry.what == "claim":  # exists only briefly, before it becomes a lock
            claim = locks.lock_at(folder / hidden("claim", entry.tag, entry.token), entry.token)
            return claim is not None and time.time() - claim.signature[0] < locks.patience.stale_s
        lock = locks.lock_at(folder / hidden("lock", entry.tag, entry.token), entry.token)
        return lock is not None and not dead(locks, entry.tag, lock)

    def _clear(self, path: Path, entry: Hidden) -> None:
        try:
            if entry.what in ("lock", "claim"):
                self._disk.remove_file(path)
            else:
                self._disk.remove_tree(path)
        except OSError as error:  # of another user, and harmless
            log.warning("%s, which a crash left, could not be removed: %s", path, error)

    def _recover_within(self, target: Path) -> None:
        current = draft_of(read_manifest(target / MANIFEST_NAME))
        for path, entry in list(hidden_entries(target)):
            if self._owned(target, entry):
                continue
            if entry.what == "draft" and current is not None and current.startswith(path.name + "/"):
                Switch(target, path, target / current, self._disk).tidy()
            else:
                self._clear(path, entry)

    def names(self) -> list[str]:
        """Return the names of the folders with a manifest."""
        found = set()
        for entry in self._root.iterdir() if self._root.is_dir() else []:
            if not entry.name.startswith(".hasten-") and (entry / MANIFEST_NAME).is_file():
                found.add(entry.name)
        return sorted(found)

    def folder(self, name: str) -> Path:
        """Return the folder with the checkpoint's files, also after a crash while its content was being replaced."""
        return home(self.path(name))

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
        outer = take(self._locks(self._root), name, str(path))
        try:
            inner = take(self._locks(path), name, str(path))
            try:
                trash = self._root / hidden("trash", name, outer.token)
                self._disk.rename(path, trash)
                self._disk.sync_folder(self._root)
                self._disk.remove_tree(trash)
            finally:
                inner.release()
        finally:
            outer.release()
