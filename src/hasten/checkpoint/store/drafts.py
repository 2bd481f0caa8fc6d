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
DRAFT_PREFIX: Final = ".hasten-draft."
TRASH_PREFIX: Final = ".hasten-trash."
"""Starts of the names of hidden folders; a token follows."""
_REPLACED_NOTE: Final = "replaced"
_NEXT_MANIFEST: Final = "next-manifest.json"
LOCK_NAME: Final = ".hasten-lock"
_LOCK_TIMEOUT_S: Final = 60.0
_LOCK_POLL_S: Final = 0.01
_ABANDONED_AFTER_S: Final = 24 * 3600.0
"""Age after which a draft counts as abandoned where the file system has no flock."""
_FLOCK_UNSUPPORTED_ERRORS: Final = frozenset(
    {errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK}
)


# -- locks --------------------------------------------------------------------------------------------------------
class FileLock:
    """An flock on a file, until it is released, garbage-collected, or the process ends."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self.release = weakref.finalize(self, _unlock, descriptor, os.getpid())
        """Releases the lock; safe to call repeatedly."""


def _unlock(descriptor: int, owner_pid: int) -> None:
    # explicitly, because forked children may hold copies of the descriptor
    if os.getpid() == owner_pid:
        with suppress(OSError):  # a file system without flock
            fcntl.flock(descriptor, fcntl.LOCK_UN)
    os.close(descriptor)


def try_lock(lock_path: Path, disk: Disk) -> FileLock | None:
    """Create a file if necessary and lock it; return None if another process holds the lock."""
    descriptor = disk.open_lock(lock_path)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in _FLOCK_UNSUPPORTED_ERRORS:
                raise
        return FileLock(descriptor)
    except BaseException as error:
        os.close(descriptor)
        if isinstance(error, BlockingIOError):
            return None
        raise


@contextmanager
def folder_lock(
    folder: Path, disk: Disk, wait_s: float = _LOCK_TIMEOUT_S
) -> Iterator[None]:
    """Context manager in which no other process saves into the folder.

    Raises: CheckpointBusyError if another process holds the lock for longer than `wait_s`.
    """
    lock_path = folder / LOCK_NAME
    deadline_s = time.monotonic() + wait_s
    while (file_lock := _lock_current_file(lock_path, disk)) is None:
        if time.monotonic() > deadline_s:
            raise CheckpointBusyError(
                f"another process has kept {folder} locked for {wait_s:g} s while saving there. Nothing was changed. Look for a "
                f"stopped process (`fuser {lock_path}`), or save into another folder."
            )
        time.sleep(_LOCK_POLL_S)
    try:
        yield
    finally:
        try:
            disk.remove_file(lock_path)
        finally:
            file_lock.release()


def _lock_current_file(lock_path: Path, disk: Disk) -> FileLock | None:
    """Return the lock, or None if it is held, or if its holder has removed the file meanwhile."""
    file_lock = try_lock(lock_path, disk)
    if file_lock is None:
        return None
    is_current = False
    try:
        with suppress(FileNotFoundError):
            is_current = os.path.samestat(
                os.fstat(file_lock.descriptor), lock_path.stat()
            )
    finally:
        if not is_current:
            file_lock.release()
    return file_lock if is_current else None


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
def create_draft(
    base_folder: Path, checkpoint_name: str, disk: Disk
) -> tuple[Path, FileLock | None]:
    """Create a draft inside `base`: a folder for the files, with the final name, in a hidden one, whose lock shows that the writer is alive.

    Ranks: main only, with the lock of `base`.
    """
    draft_folder = base_folder / f"{DRAFT_PREFIX}{secrets.token_hex(6)}"
    disk.make_folder(draft_folder)
    file_lock = try_lock(draft_folder / LOCK_NAME, disk)
    disk.make_folder(draft_folder / checkpoint_name)
    return draft_folder / checkpoint_name, file_lock


def remove_draft(content_folder: Path, file_lock: FileLock | None, disk: Disk) -> None:
    """Delete a draft; its lock file is closed first, because NFS and FUSE keep open files in their folder."""
    if file_lock is not None:
        file_lock.release()
    disk.remove_tree(content_folder.parent)


@contextmanager
def temporary_draft(folder: Path, disk: Disk) -> Iterator[Path]:
    """Context manager for files that are renamed from a draft into `folder` one by one; what is left is removed."""
    disk.make_folder(folder)
    with folder_lock(folder, disk):
        remove_leftovers(folder, disk)
        draft_content, file_lock = create_draft(folder, "files", disk)
    try:
        yield draft_content
    finally:
        remove_draft(draft_content, file_lock, disk)


def hidden_entries(folder: Path) -> Iterator[Path]:
    """Yield the hidden entries of a folder; none when the folder does not exist."""
    try:
        paths = sorted(folder.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return
    for path in paths:
        if path.name.startswith((DRAFT_PREFIX, TRASH_PREFIX)):
            yield path


def draft_of(manifest: Manifest | None) -> str | None:
    """Return the path of the draft that a manifest's files are still in; None if they have their final names."""
    if manifest is None or not manifest.files:
        return None
    path_parts = manifest.files[0].name.split("/")
    if len(path_parts) < 3 or not path_parts[0].startswith(DRAFT_PREFIX):
        return None
    return f"{path_parts[0]}/{path_parts[1]}"


def content_folder(folder: Path) -> Path:
    """Return the folder that holds a checkpoint's files under their final names: the folder itself, or a draft in it."""
    draft_path = draft_of(read_manifest(folder / MANIFEST_NAME))
    return folder if draft_path is None else folder / draft_path


def remove_leftovers(folder: Path, disk: Disk, current_draft: str = "") -> None:
    """Finish or remove what interrupted saves have left in a folder, except the draft named `current`.

    Ranks: main only, with the folder's lock.
    """
    committed_draft = draft_of(read_manifest(folder / MANIFEST_NAME))
    for hidden_path in hidden_entries(folder):
        if hidden_path.name == current_draft:
            continue
        try:
            if hidden_path.name.startswith(DRAFT_PREFIX) and not is_abandoned(
                hidden_path / LOCK_NAME
            ):
                continue
            if committed_draft is not None and committed_draft.startswith(
                f"{hidden_path.name}/"
            ):
                give_final_names(folder, disk)
            else:
                disk.remove_tree(hidden_path)
        except OSError as error:  # in use, or another user's; the next save tries again
            log.debug(
                "%s, which an interrupted save left, could not be removed: %s",
                hidden_path,
                error,
            )


def replace_content(
    folder: Path,
    draft_content: Path,
    manifest: Manifest,
    keeps_exports: bool,
    disk: Disk,
) -> None:
    """Make the files in `content`, a folder of a draft inside `folder`, the checkpoint of the folder.

    One rename of a manifest, which lists the files where they are, commits them; then they get their final names.
    Ranks: main only, with the folder's lock.
    Raises: CheckpointError when the folder holds an exported model and `keeps_exports`, or the user's files have one of the names.
    """
    outdated_names = _outdated_files(folder, keeps_exports)
    _check_names(folder, manifest, outdated_names)
    content_path = draft_content.relative_to(folder).as_posix()
    placed_files = [
        msgspec.structs.replace(file, name=f"{content_path}/{file.name}")
        for file in manifest.files
    ]
    manifest_notes = {**manifest.notes, _REPLACED_NOTE: sorted(outdated_names)}
    raw_manifest = encode_manifest(
        msgspec.structs.replace(
            manifest, files=tuple(placed_files), notes=manifest_notes
        )
    )
    write_files(
        draft_content.parent,
        {_NEXT_MANIFEST: Blob([raw_manifest], len(raw_manifest))},
        disk,
        threads=1,
    )
    disk.rename(draft_content.parent / _NEXT_MANIFEST, folder / MANIFEST_NAME)
    disk.sync_folder(folder)
    give_final_names(folder, disk)
    remove_leftovers(folder, disk, current_draft=draft_content.parent.name)


def _outdated_files(folder: Path, keeps_exports: bool) -> set[str]:
    """Return the files of the folder's earlier checkpoint."""
    weight_names = exported_weights(folder)
    previous_manifest = read_manifest(folder / MANIFEST_NAME)
    if previous_manifest is not None:
        draft_path = draft_of(previous_manifest)
        prefix = "" if draft_path is None else f"{draft_path}/"
        return {file.name.removeprefix(prefix) for file in previous_manifest.files}
    if os.path.lexists(folder / MANIFEST_NAME):  # damaged: the weights are its files
        return set(weight_names)
    if weight_names and keeps_exports:
        raise CheckpointError(
            f"{folder} holds an exported model ({', '.join(weight_names[:3])}), and load_model would read the one or the other. Nothing was "
            "changed. Save the checkpoint into another folder, or delete the model first."
        )
    return set()


def _check_names(
    folder: Path, manifest: Manifest, outdated_names: Collection[str]
) -> None:
    for file in manifest.files:
        file_path = folder / file.name
        parent_files = [
            parent
            for parent in file_path.parents
            if parent.is_relative_to(folder) and parent.is_file()
        ]
        conflicts = [
            parent
            for parent in parent_files
            if parent.relative_to(folder).as_posix() not in outdated_names
        ]
        if file_path.is_dir():
            inner_names = [
                inner_path.relative_to(folder).as_posix()
                for inner_path in file_path.rglob("*")
                if inner_path.is_file()
            ]
            conflicts += [file_path] if set(inner_names) - set(outdated_names) else []
        if conflicts:
            raise CheckpointError(
                f"{conflicts[0]} conflicts with {file.name}, which this save writes: one is a file, the other a folder. "
                "Nothing was changed. Move it, or save into another folder."
            )


def give_final_names(folder: Path, disk: Disk) -> None:
    """Remove the files that a committed draft replaces, link its files under their final names, and remove the draft.

    The checkpoint is complete before, after and at every point between, also when this fails.
    """
    pointer_manifest = read_manifest(folder / MANIFEST_NAME)
    draft_path = draft_of(pointer_manifest)
    if pointer_manifest is None or draft_path is None:
        return
    draft_content = folder / draft_path
    try:
        for file_name in pointer_manifest.notes.get(_REPLACED_NOTE, ()):
            if not _is_same_file(draft_content / file_name, folder / file_name):
                disk.remove_file(folder / file_name)
                _remove_empty_parents(folder / file_name, folder)
        _link_files(
            draft_content,
            folder,
            [
                file.name.removeprefix(f"{draft_path}/")
                for file in pointer_manifest.files
            ],
            disk,
        )
        disk.remove_file(draft_content.parent / _NEXT_MANIFEST)
        disk.link(draft_content / MANIFEST_NAME, draft_content.parent / _NEXT_MANIFEST)
        disk.rename(draft_content.parent / _NEXT_MANIFEST, folder / MANIFEST_NAME)
        disk.sync_folder(folder)
        disk.remove_tree(draft_content.parent)
    except OSError as error:
        for file in pointer_manifest.files:
            _remove_empty_parents(
                folder / file.name.removeprefix(f"{draft_path}/"), folder
            )
        log.warning(
            "the files of %s stay in its folder %s, where they were written (load_state finds them there): renaming them "
            "failed with %s",
            *(folder, draft_path, error),
        )


def _link_files(
    draft_content: Path, folder: Path, file_names: Collection[str], disk: Disk
) -> None:
    changed_folders = {folder}
    # also empty folders, as a rename of the whole would
    for path in sorted(draft_content.rglob("*")):
        if path.is_dir():
            final_path = folder / path.relative_to(draft_content)
            disk.make_folder(final_path)
            changed_folders.add(final_path)
    for file_name in file_names:
        if not _is_same_file(draft_content / file_name, folder / file_name):
            disk.remove_file(folder / file_name)
            disk.link(draft_content / file_name, folder / file_name)
    for path in changed_folders:
        disk.sync_folder(path)


def _is_same_file(source: Path, target: Path) -> bool:
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
