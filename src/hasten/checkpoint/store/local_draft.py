"""Drafts of checkpoints in a folder: hidden until one rename makes them visible."""

from __future__ import annotations

import errno
import logging
import os
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec

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
)
from hasten.checkpoint.store.disk import FULL, BlobWriter, ChunkReader, Disk, cannot_write, default_threads
from hasten.checkpoint.store.locks import LocalLocks, hidden, hidden_entries, parse_hidden
from hasten.checkpoint.store.occupied import check_export
from hasten.checkpoint.store.outside_files import read_outside
from hasten.checkpoint.store.writer_lock import Claim, take
from hasten.errors import CheckpointError

log = logging.getLogger(__name__)
_POINTER = "pointer.json"
_PREVIOUS = "previous.json"
_SPARE = "link"


def absent(folder: Path, files: Iterable[FileRecord]) -> list[str]:
    """Return the names of files that are not in the folder with their size."""
    return [file.name for file in files if _size(folder / file.name) != file.size]


def _size(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except OSError:
        return None


def missing(place: Path, names: Sequence[str]) -> CheckpointError:
    """Return the error for a commit that does not find the files it lists."""
    listed = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
    return CheckpointError(
        f"{place}: {listed} disappeared while the checkpoint was being committed, so it was withdrawn. What was saved there "
        "before stays as it was. Find out what deletes files there (a clean-up job?), and save again."
    )


def read_manifest(path: Path) -> Manifest | None:
    """Return the manifest in a file; None when it is missing or unreadable."""
    try:
        return decode(read_outside(path, MAX_MANIFEST_BYTES), str(path))
    except (OSError, CheckpointError):
        return None


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
    """Return the folder that holds the checkpoint's files under their final names: `folder`, or the draft in it."""
    if not any(entry.what == "draft" for _, entry in hidden_entries(folder)):
        return folder
    prefix = draft_of(read_manifest(folder / MANIFEST_NAME))
    return folder / prefix if prefix is not None and (folder / prefix).is_dir() else folder


class Switch:
    """Replacement of a folder's content by the content of a draft inside it."""

    def __init__(self, folder: Path, draft: Path, content: Path, disk: Disk) -> None:
        self._folder = folder
        self._draft = draft
        self._content = content
        self._disk = disk

    def commit(self, manifest: Manifest) -> None:
        """Make the draft the checkpoint of the folder; its manifest is in the draft already.

        Raises: CheckpointError when files have disappeared, or when a file or folder of the user has one of the names.
        """
        self._check_names(manifest)
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

    def _check_names(self, manifest: Manifest) -> None:
        old = read_manifest(self._folder / MANIFEST_NAME)
        ours = {file.name for file in old.files} if old is not None else set()
        if not os.path.lexists(self._folder / MANIFEST_NAME) and manifest.number is None:
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
                    f"{taken} is in the way of {file.name}, which this save writes: one is a file, the other a folder. "
                    "Nothing was changed. Move it, or save into another folder."
                )

    def _left_in(self, path: Path, ours: set[str]) -> Iterable[Path]:
        return (p for p in path.rglob("*") if p.is_file() and p.relative_to(self._folder).as_posix() not in ours)

    def _write(self, name: str, raw: bytes) -> Path:
        path = self._draft / name
        self._disk.remove_file(path)
        BlobWriter(self._disk, 1).write(self._draft, {name: Blob([raw], len(raw))})
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

    def tidy(self) -> None:
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
                "the files of %s stay in its folder %s, where they were written (load_state finds them there): giving them "
                "their own names failed with %s",
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


class LocalDraft:
    """Hidden folder, next to the checkpoint it will become or inside the folder whose content it will replace.

    The files are in a subfolder that already has the checkpoint's name, which is the folder hooks see. The process
    that started the draft holds the `claim`; processes that join it have none.
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
        """Rename the draft to the checkpoint; return False when a folder of that name has appeared meanwhile."""
        # A process that finds the folder looks for locks inside it, so the draft contains a lock.
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
        """Move the draft into the folder whose content it will replace, and take that folder's lock."""
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
        """Delete the draft, unless it has become the checkpoint: then the next save completes the replacement."""
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
    reader, starts = ChunkReader(), range(0, size, CHUNK_BYTES)
    with ThreadPoolExecutor(threads or default_threads()) as pool:
        sums = tuple(pool.map(lambda start: reader.checksum(path, start, min(start + CHUNK_BYTES, size)), starts))
    return FileRecord(name=name, size=size, sums=sums)
