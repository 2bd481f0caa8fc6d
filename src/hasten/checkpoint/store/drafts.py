"""Drafts of checkpoints: hidden folders that hold a save's files until it is committed, and the locks of folders."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import secrets
import time
import weakref
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

import msgspec

from hasten.checkpoint.base import Blob
from hasten.checkpoint.format.manifest import (
    MANIFEST_NAME,
    Manifest,
    encode_manifest,
    read_manifest,
)
from hasten.checkpoint.store.disk import Disk, write_files
from hasten.checkpoint.store.occupied import exported_weights
from hasten.errors import CheckpointBusyError, CheckpointError

log = logging.getLogger(__name__)
DRAFT: Final = ".hasten-draft."
TRASH: Final = ".hasten-trash."
"""Starts of the names of hidden folders; a token follows."""
_REPLACED: Final = "replaced"
_NEXT_MANIFEST: Final = "next-manifest.json"
LOCK_NAME: Final = ".hasten-lock"
_WAIT_S: Final = 60.0
_PAUSE_S: Final = 0.01
_ABANDONED_AFTER_S: Final = 24 * 3600.0
"""Age after which a draft counts as abandoned where the file system has no flock."""
_UNSUPPORTED: Final = frozenset({errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK})


# -- locks --------------------------------------------------------------------------------------------------------
class FileLock:
    """An flock on a file, until it is released, garbage-collected, or the process ends."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self.release = weakref.finalize(self, _unlock, descriptor, os.getpid())
        """Releases the lock; safe to call repeatedly."""


def _unlock(descriptor: int, owner: int) -> None:
    # explicitly, because forked children may hold copies of the descriptor
    if os.getpid() == owner:
        with suppress(OSError):  # a file system without flock
            fcntl.flock(descriptor, fcntl.LOCK_UN)
    os.close(descriptor)


def try_lock(path: Path, disk: Disk) -> FileLock | None:
    """Create a file if necessary and lock it; return None if another process holds the lock."""
    descriptor = disk.open_lock(path)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in _UNSUPPORTED:
                raise
        return FileLock(descriptor)
    except BaseException as error:
        os.close(descriptor)
        if isinstance(error, BlockingIOError):
            return None
        raise


@contextmanager
def folder_lock(folder: Path, disk: Disk, wait_s: float = _WAIT_S) -> Iterator[None]:
    """Context manager in which no other process saves into the folder.

    Raises: CheckpointBusyError if another process holds the lock for longer than `wait_s`.
    """
    path = folder / LOCK_NAME
    deadline = time.monotonic() + wait_s
    while (lock := _lock_current_file(path, disk)) is None:
        if time.monotonic() > deadline:
            raise CheckpointBusyError(
                f"another process has kept {folder} locked for {wait_s:g} s while saving there. Nothing was changed. Look for a "
                f"stopped process (`fuser {path}`), or save into another folder."
            )
        time.sleep(_PAUSE_S)
    try:
        yield
    finally:
        try:
            disk.remove_file(path)
        finally:
            lock.release()


def _lock_current_file(path: Path, disk: Disk) -> FileLock | None:
    """Return the lock, or None if it is held, or if its holder has removed the file meanwhile."""
    lock = try_lock(path, disk)
    if lock is None:
        return None
    is_current = False
    try:
        with suppress(FileNotFoundError):
            is_current = os.path.samestat(os.fstat(lock.descriptor), path.stat())
    finally:
        if not is_current:
            lock.release()
    return lock if is_current else None


def is_abandoned(lock_file: Path) -> bool:
    """Return True if the process that wrote a draft has ended, judged by the draft's lock file."""
    try:
        descriptor = os.open(lock_file, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return True
    except PermissionError:  # another user's
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # no flock here
        return time.time() - os.fstat(descriptor).st_mtime > _ABANDONED_AFTER_S
    finally:
        os.close(descriptor)
    return True


# -- drafts -------------------------------------------------------------------------------------------------------
def create_draft(base: Path, name: str, disk: Disk) -> tuple[Path, FileLock | None]:
    """Create a draft inside `base`: a folder for the files, with the final name, in a hidden one, whose lock shows that the writer is alive.

    Ranks: main only, with the lock of `base`.
    """
    draft = base / f"{DRAFT}{secrets.token_hex(6)}"
    disk.make_folder(draft)
    lock = try_lock(draft / LOCK_NAME, disk)
    disk.make_folder(draft / name)
    return draft / name, lock


def remove_draft(content: Path, lock: FileLock | None, disk: Disk) -> None:
    """Delete a draft; its lock file is closed first, because NFS and FUSE keep open files in their folder."""
    if lock is not None:
        lock.release()
    disk.remove_tree(content.parent)


@contextmanager
def temporary_draft(folder: Path, disk: Disk) -> Iterator[Path]:
    """Context manager for files that are renamed from a draft into `folder` one by one; what is left is removed."""
    disk.make_folder(folder)
    with folder_lock(folder, disk):
        remove_leftovers(folder, disk)
        content, lock = create_draft(folder, "files", disk)
    try:
        yield content
    finally:
        remove_draft(content, lock, disk)


def hidden_entries(folder: Path) -> Iterator[Path]:
    """Yield the hidden entries of a folder; none when the folder does not exist."""
    try:
        paths = sorted(folder.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return
    for path in paths:
        if path.name.startswith((DRAFT, TRASH)):
            yield path


def draft_of(manifest: Manifest | None) -> str | None:
    """Return the path of the draft that a manifest's files are still in; None if they have their final names."""
    if manifest is None or not manifest.files:
        return None
    parts = manifest.files[0].name.split("/")
    if len(parts) < 3 or not parts[0].startswith(DRAFT):
        return None
    return f"{parts[0]}/{parts[1]}"


def content_folder(folder: Path) -> Path:
    """Return the folder that holds a checkpoint's files under their final names: the folder itself, or a draft in it."""
    draft = draft_of(read_manifest(folder / MANIFEST_NAME))
    return folder if draft is None else folder / draft


def remove_leftovers(folder: Path, disk: Disk, current: str = "") -> None:
    """Finish or remove what interrupted saves have left in a folder, except the draft named `current`.

    Ranks: main only, with the folder's lock.
    """
    committed_draft = draft_of(read_manifest(folder / MANIFEST_NAME))
    for path in hidden_entries(folder):
        if path.name == current:
            continue
        try:
            if path.name.startswith(DRAFT) and not is_abandoned(path / LOCK_NAME):
                continue
            if committed_draft is not None and committed_draft.startswith(
                f"{path.name}/"
            ):
                give_final_names(folder, disk)
            else:
                disk.remove_tree(path)
        except OSError as error:  # in use, or another user's; the next save tries again
            log.debug(
                "%s, which an interrupted save left, could not be removed: %s",
                path,
                error,
            )


def replace_content(
    folder: Path,
    content: Path,
    manifest: Manifest,
    keeps_exports: bool,
    disk: Disk,
) -> None:
    """Make the files in `content`, a folder of a draft inside `folder`, the checkpoint of the folder.

    One rename of a manifest, which lists the files where they are, commits them; then they get their final names.
    Ranks: main only, with the folder's lock.
    Raises: CheckpointError when the folder holds an exported model and `keeps_exports`, or the user's files have one of the names.
    """
    outdated = _outdated_files(folder, keeps_exports)
    _check_names(folder, manifest, outdated)
    place = content.relative_to(folder).as_posix()
    files = [
        msgspec.structs.replace(file, name=f"{place}/{file.name}")
        for file in manifest.files
    ]
    notes = {**manifest.notes, _REPLACED: sorted(outdated)}
    raw = encode_manifest(
        msgspec.structs.replace(manifest, files=tuple(files), notes=notes)
    )
    write_files(
        content.parent, {_NEXT_MANIFEST: Blob([raw], len(raw))}, disk, threads=1
    )
    disk.rename(content.parent / _NEXT_MANIFEST, folder / MANIFEST_NAME)
    disk.sync_folder(folder)
    give_final_names(folder, disk)
    remove_leftovers(folder, disk, current=content.parent.name)


def _outdated_files(folder: Path, keeps_exports: bool) -> set[str]:
    """Return the files of the folder's earlier checkpoint."""
    weights = exported_weights(folder)
    previous = read_manifest(folder / MANIFEST_NAME)
    if previous is not None:
        draft = draft_of(previous)
        prefix = "" if draft is None else f"{draft}/"
        return {file.name.removeprefix(prefix) for file in previous.files}
    if os.path.lexists(folder / MANIFEST_NAME):  # damaged: the weights are its files
        return set(weights)
    if weights and keeps_exports:
        raise CheckpointError(
            f"{folder} holds an exported model ({', '.join(weights[:3])}), and load_model would read the one or the other. Nothing was "
            "changed. Save the checkpoint into another folder, or delete the model first."
        )
    return set()


def _check_names(folder: Path, manifest: Manifest, outdated: Collection[str]) -> None:
    for file in manifest.files:
        path = folder / file.name
        parents = [
            parent
            for parent in path.parents
            if parent.is_relative_to(folder) and parent.is_file()
        ]
        conflicts = [
            parent
            for parent in parents
            if parent.relative_to(folder).as_posix() not in outdated
        ]
        if path.is_dir():
            inner = [
                entry.relative_to(folder).as_posix()
                for entry in path.rglob("*")
                if entry.is_file()
            ]
            conflicts += [path] if set(inner) - set(outdated) else []
        if conflicts:
            raise CheckpointError(
                f"{conflicts[0]} conflicts with {file.name}, which this save writes: one is a file, the other a folder. "
                "Nothing was changed. Move it, or save into another folder."
            )


def give_final_names(folder: Path, disk: Disk) -> None:
    """Remove the files that a committed draft replaces, link its files under their final names, and remove the draft.

    The checkpoint is complete before, after and at every point between, also when this fails.
    """
    pointer = read_manifest(folder / MANIFEST_NAME)
    place = draft_of(pointer)
    if pointer is None or place is None:
        return
    content = folder / place
    try:
        for name in pointer.notes.get(_REPLACED, ()):
            if not _is_same(content / name, folder / name):
                disk.remove_file(folder / name)
                _remove_empty_parents(folder / name, folder)
        _link_all(
            content,
            folder,
            [file.name.removeprefix(f"{place}/") for file in pointer.files],
            disk,
        )
        disk.remove_file(content.parent / _NEXT_MANIFEST)
        disk.link(content / MANIFEST_NAME, content.parent / _NEXT_MANIFEST)
        disk.rename(content.parent / _NEXT_MANIFEST, folder / MANIFEST_NAME)
        disk.sync_folder(folder)
        disk.remove_tree(content.parent)
    except OSError as error:
        for file in pointer.files:
            _remove_empty_parents(folder / file.name.removeprefix(f"{place}/"), folder)
        log.warning(
            "the files of %s stay in its folder %s, where they were written (load_state finds them there): renaming them "
            "failed with %s",
            *(folder, place, error),
        )


def _link_all(content: Path, folder: Path, names: Collection[str], disk: Disk) -> None:
    changed_folders = {folder}
    # also empty folders, as a rename of the whole would
    for path in sorted(content.rglob("*")):
        if path.is_dir():
            final_path = folder / path.relative_to(content)
            disk.make_folder(final_path)
            changed_folders.add(final_path)
    for name in names:
        if not _is_same(content / name, folder / name):
            disk.remove_file(folder / name)
            disk.link(content / name, folder / name)
    for path in changed_folders:
        disk.sync_folder(path)


def _is_same(source: Path, target: Path) -> bool:
    try:
        return os.path.samestat(source.lstat(), target.lstat())
    except OSError:
        return False


def _remove_empty_parents(path: Path, folder: Path) -> None:
    for parent in path.parents:
        if parent == folder or not parent.is_relative_to(folder):
            return
        try:
            parent.rmdir()
        except OSError:  # not empty, or already removed
            return
