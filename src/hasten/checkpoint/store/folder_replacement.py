"""Replacement of a folder's content by that of a draft inside it: one rename of the manifest, then a clean-up."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from hasten.checkpoint.base import Blob
from hasten.checkpoint.format.manifest import (
    MANIFEST_NAME,
    MAX_MANIFEST_BYTES,
    Manifest,
    absent,
    encode,
    read_manifest,
    read_outside,
)
from hasten.checkpoint.store.disk import Disk, write_files
from hasten.checkpoint.store.locks import hidden_entries, parse_hidden
from hasten.checkpoint.store.occupied import check_export
from hasten.errors import CheckpointError

log = logging.getLogger(__name__)
_POINTER = "pointer.json"
_PREVIOUS = "previous.json"
_SPARE = "link"


def missing(place: Path, names: Sequence[str]) -> CheckpointError:
    """Return the error for a commit that does not find the files it lists."""
    listed = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
    return CheckpointError(
        f"{place}: {listed} disappeared while the checkpoint was being committed, so it was withdrawn. The earlier "
        "checkpoint is unchanged. Find out what deletes files there (a clean-up job?), and save again."
    )


def draft_of(manifest: Manifest | None) -> str | None:
    """Return the path of the draft that a manifest's files are still in; None if they have their final names."""
    parts = manifest.files[0].name.split("/") if manifest is not None and manifest.files else []
    found = parse_hidden(parts[0]) if len(parts) > 2 else None
    if manifest is None or found is None or found.what != "draft":
        return None
    prefix = f"{parts[0]}/{parts[1]}/"
    return prefix if all(file.name.startswith(prefix) for file in manifest.files) else None


def points_to(folder: Path, draft: Path) -> bool:
    """Return True if the checkpoint in a folder is the one whose files are in the draft."""
    prefix = draft_of(read_manifest(folder / MANIFEST_NAME))
    return prefix is not None and prefix.startswith(f"{draft.name}/")


def home(folder: Path) -> Path:
    """Return the folder that holds the files under their final names: the draft that the manifest points to, if any."""
    prefix = draft_of(read_manifest(folder / MANIFEST_NAME))
    return folder / prefix if prefix is not None and (folder / prefix).is_dir() else folder


class FolderReplacement:
    """Replacement of a folder's content by the content of a draft inside it."""

    def __init__(self, folder: Path, draft: Path, content: Path, disk: Disk) -> None:
        self._folder = folder
        self._draft = draft
        self._content = content
        self._disk = disk

    def commit(self, manifest: Manifest, keeps_exports: bool = True) -> None:
        """Make the draft the checkpoint of the folder; its manifest is in the draft already.

        Raises: CheckpointError when files have disappeared, or when a file or folder of the user has one of the names.
        """
        self._check_names(manifest, keeps_exports)
        prefix = self._content.relative_to(self._folder).as_posix()
        moved = [msgspec.structs.replace(file, name=f"{prefix}/{file.name}") for file in manifest.files]
        before = self._folder / MANIFEST_NAME
        if before.is_file():
            self._write(_PREVIOUS, read_outside(before, MAX_MANIFEST_BYTES))
        try:
            self._replace_manifest(msgspec.structs.replace(manifest, files=tuple(moved)))
            if names := absent(self._content, manifest.files):
                raise missing(self._folder, names)
        except BaseException:  # the draft is deleted now, so no manifest may point to it
            if points_to(self._folder, self._draft):
                self._withdraw()
            raise

    def _check_names(self, manifest: Manifest, keeps_exports: bool) -> None:
        old = read_manifest(self._folder / MANIFEST_NAME)
        ours = {file.name for file in old.files} if old is not None else set()
        numbered = manifest.number is not None
        if keeps_exports and not numbered and not os.path.lexists(self._folder / MANIFEST_NAME):
            check_export(self._folder, manifest)
        for file in manifest.files:
            parents = [self._folder.joinpath(*file.name.split("/")[:n]) for n in range(1, file.name.count("/") + 1)]
            taken = next(
                (p for p in parents if p.is_file() and p.relative_to(self._folder).as_posix() not in ours), None
            )
            path = self._folder / file.name
            if path.is_dir() and any(self._left_in(path, ours)):
                taken = path
            if taken is not None:
                raise CheckpointError(
                    f"{taken} conflicts with {file.name}, which this save writes: one is a file, the other a folder. "
                    "Nothing was changed. Move it, or save into another folder."
                )

    def _left_in(self, path: Path, ours: set[str]) -> Iterable[Path]:
        return (p for p in path.rglob("*") if p.is_file() and p.relative_to(self._folder).as_posix() not in ours)

    def _write(self, name: str, raw: bytes) -> Path:
        path = self._draft / name
        self._disk.remove_file(path)
        write_files(self._draft, {name: Blob([raw], len(raw))}, self._disk, threads=1)
        return path

    def _replace_manifest(self, manifest: Manifest) -> None:
        self._disk.rename(self._write(_POINTER, encode(manifest)), self._folder / MANIFEST_NAME)
        self._disk.sync_folder(self._folder)

    def _withdraw(self) -> None:
        previous = self._draft / _PREVIOUS
        if previous.is_file():
            self._disk.rename(previous, self._folder / MANIFEST_NAME)
        else:
            self._disk.remove_file(self._folder / MANIFEST_NAME)
        self._disk.sync_folder(self._folder)

    def clean_up(self) -> None:
        """Link the files under their final names, and remove the old checkpoint and the draft.

        The checkpoint is complete before, after and at every point between, also when this fails.
        """
        manifest = read_manifest(self._content / MANIFEST_NAME)
        assert manifest is not None, f"{self._content} is committed and has its manifest"
        try:
            self._remove_old(manifest)
            self._link_all(manifest)
        except OSError as error:
            log.warning(
                "the files of %s stay in its folder %s, where they were written (load_state finds them there): renaming "
                "them failed with %s",
                *(self._folder, self._content.relative_to(self._folder), error),
            )
            self._remove_outdated(manifest)
            return
        if absent(self._folder, manifest.files):  # removed by another process: the draft still has them
            return
        self._replace_manifest(manifest)
        self._disk.remove_tree(self._draft)

    def _remove_old(self, manifest: Manifest) -> None:
        old, kept = read_manifest(self._draft / _PREVIOUS), {file.name for file in manifest.files}
        prefix = draft_of(old) or ""
        for file in old.files if old is not None else ():
            name = file.name.removeprefix(prefix)
            if name not in kept:
                self._disk.remove_file(self._folder / name)
                self._remove_empty(self._folder / name)
        for path, entry in hidden_entries(self._folder):
            if entry.what == "draft" and path != self._draft:
                self._disk.remove_tree(path)

    def _remove_outdated(self, manifest: Manifest) -> None:
        """Remove files of the old checkpoint, and partly linked ones of the new, under names that the new one uses."""
        old = read_manifest(self._draft / _PREVIOUS)
        names = {file.name for file in old.files} if old is not None else set()
        for file in manifest.files:
            path = self._folder / file.name
            if file.name in names or _same(self._content / file.name, path):
                with suppress(OSError):  # no manifest lists it, and the next save tries again
                    self._disk.remove_file(path)
            self._remove_empty(path)

    def _remove_empty(self, path: Path) -> None:
        """Remove the folders that a removed file leaves empty."""
        for parent in path.parents:
            if parent == self._folder or not parent.is_relative_to(self._folder):
                return
            try:
                parent.rmdir()
            except OSError:  # not empty, or already removed
                return

    def _link_all(self, manifest: Manifest) -> None:
        folders = {self._folder}
        for root, names, _ in os.walk(self._content):  # also empty folders, as a rename of the whole would
            made = [self._folder / (Path(root) / name).relative_to(self._content) for name in names]
            for path in made:
                self._disk.make_folder(path)
            folders.update(made)
        spare = self._draft / _SPARE
        for file in manifest.files:
            source, target = self._content / file.name, self._folder / file.name
            if _same(source, target):
                continue
            self._disk.remove_file(spare)
            self._disk.link(source, spare)
            self._disk.rename(spare, target)
        for path in folders:
            self._disk.sync_folder(path)


def _same(source: Path, target: Path) -> bool:
    try:
        return os.path.samestat(source.lstat(), target.lstat())
    except OSError:
        return False
