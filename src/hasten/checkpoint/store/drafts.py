"""Drafts that replace the content of a folder file by file, and removal of what interrupted saves have left."""

from __future__ import annotations

import fcntl
import logging
import os
import time
from collections.abc import Collection
from pathlib import Path
from typing import Final

import msgspec

from hasten.checkpoint.base import Blob
from hasten.checkpoint.format.manifest import (
    DRAFT_PREFIX,
    MANIFEST_NAME,
    Manifest,
    draft_of,
    encode_manifest,
    read_manifest,
)
from hasten.checkpoint.store.disk import Disk, write_files
from hasten.checkpoint.store.occupied import exported_weights
from hasten.errors import CheckpointError

log = logging.getLogger(__name__)
TRASH_PREFIX: Final = ".hasten-trash."
"""Start of the names of checkpoints that are being deleted; a token follows."""
LEFTOVERS: Final = ".hasten-[dt]*"
"""Pattern of the names of drafts and deleted checkpoints."""
_REPLACED_NOTE: Final = "replaced"
_NEXT_MANIFEST: Final = "next-manifest.json"
LOCK_NAME: Final = ".hasten-lock"
_ABANDONED_AFTER_S: Final = 24 * 3600.0
"""Age after which a draft counts as abandoned where the file system has no flock."""


def _is_abandoned(lock_file: Path) -> bool:
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


def remove_leftovers(folder: Path, disk: Disk, current_draft: str = "") -> None:
    """Finish or remove what interrupted saves have left in a folder, except the draft named `current`.

    Ranks: main only, with the folder's lock.
    """
    committed_draft = draft_of(read_manifest(folder / MANIFEST_NAME))
    for hidden_path in sorted(folder.glob(LEFTOVERS)):
        is_draft = hidden_path.name.startswith(DRAFT_PREFIX)
        if hidden_path.name == current_draft:
            continue
        try:
            if is_draft and not _is_abandoned(hidden_path / LOCK_NAME):
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
