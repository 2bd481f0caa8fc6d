"""Checkpoints in a folder: drafts become visible by one rename, and a crash at any point loses nothing."""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from hasten.checkpoint.base import Blob
from hasten.checkpoint.disk import BlobWriter, ChunkReader, Disk, default_threads
from hasten.checkpoint.manifest import (
    CHUNK_BYTES,
    MANIFEST_NAME,
    MAX_MANIFEST_BYTES,
    FileRecord,
    Manifest,
    decode,
    encode,
    inside,
)
from hasten.errors import CheckpointError, CorruptCheckpointError, IncompleteCheckpointError

_NUMBERED = re.compile(r"^(.*?)(\d+)$")
_MARK = ".hasten-{what}.{name}.{token}"


def _hidden(what: str, name: str, token: str) -> str:
    return _MARK.format(what=what, name=name, token=token)


def _parse_hidden(entry: str) -> tuple[str, str] | None:
    found = re.fullmatch(r"\.hasten-(draft|old|trash)\.(.+)\.[0-9a-f]+", entry)
    return (found[1], found[2]) if found else None


def same_family(name: str, other: str) -> bool:
    """Whether two names belong to one run: equal, or numbered alike (checkpoint_3, checkpoint_12)."""
    ours, theirs = _NUMBERED.match(name), _NUMBERED.match(other)
    return name == other or (ours is not None and theirs is not None and ours[1] == theirs[1])


class LocalDraft:
    """A hidden folder beside the checkpoint it will become."""

    def __init__(self, root: Path, name: str, token: str, disk: Disk, threads: int | None) -> None:
        self._root = root
        self._name = name
        self._token = token
        self._disk = disk
        self._threads = threads
        self._path = root / _hidden("draft", name, token)

    @property
    def name(self) -> str:
        return self._name

    @property
    def token(self) -> str:
        return self._token

    @property
    def folder(self) -> Path:
        return self._path

    def put(self, files: Mapping[str, Blob]) -> dict[str, FileRecord]:
        """Write files in parallel; they are on the disk when this returns."""
        return BlobWriter(self._disk, self._threads).write(self._path, files)

    def adopt(self, known: Sequence[str]) -> list[FileRecord]:
        """Records of files that hooks left in the draft, synced."""
        records = []
        for path in sorted(self._path.rglob("*")):
            name = path.relative_to(self._path).as_posix()
            if path.is_dir():
                self._disk.sync_folder(path)
            elif name not in known and name != MANIFEST_NAME:
                records.append(self._record(path, name))
        return records

    def _record(self, path: Path, name: str) -> FileRecord:
        inside(self._path, name)
        with path.open("rb") as file:
            self._disk.sync(file.fileno())
        size = path.stat().st_size
        reader, starts = ChunkReader(), range(0, size, CHUNK_BYTES)
        with ThreadPoolExecutor(self._threads or default_threads()) as pool:
            sums = tuple(pool.map(lambda start: reader.checksum(path, start, min(start + CHUNK_BYTES, size)), starts))
        return FileRecord(name=name, size=size, sums=sums)

    def commit(self, manifest: Manifest) -> None:
        """Write the manifest, sync, and give the folder its final name."""
        raw = encode(manifest)
        BlobWriter(self._disk, 1).write(self._path, {MANIFEST_NAME: Blob([raw], len(raw))})
        self._disk.sync_folder(self._path)
        final = self._root / self._name
        displaced = None
        if final.is_dir() and any(final.iterdir()):  # an empty folder is replaced by the rename itself
            displaced = self._root / _hidden("old", self._name, self._token)
            self._disk.rename(final, displaced)
        self._disk.rename(self._path, final)
        self._disk.sync_folder(self._root)
        if displaced is not None:
            retire(displaced, final, self._disk)

    def abort(self) -> None:
        """Throw the draft away."""
        if self._path.exists():
            self._disk.remove_tree(self._path)


class LocalStore:
    """Checkpoints as folders of `root`, which all ranks of a machine see."""

    def __init__(self, root: str | Path, disk: Disk | None = None, threads: int | None = None) -> None:
        self._root = Path(root).expanduser().absolute()
        self._disk = disk or Disk()
        self._threads = threads

    @property
    def address(self) -> str:
        return str(self._root)

    @property
    def remote(self) -> bool:
        return False

    def path(self, name: str) -> Path:
        """The folder of a checkpoint."""
        return self._root / name

    def begin(self, name: str) -> LocalDraft:
        """A new draft, after clearing away what earlier crashes left."""
        try:
            self._disk.make_folder(self._root)
            self.recover(name)
            draft = LocalDraft(self._root, name, secrets.token_hex(6), self._disk, self._threads)
            self._disk.make_folder(draft.folder)
        except OSError as error:
            raise CheckpointError(
                f"cannot start the checkpoint {name!r} in {self._root}: {error}. Nothing was changed. Give a folder "
                "that can be written to."
            ) from error
        return draft

    def join(self, name: str, token: str) -> LocalDraft | None:
        """The draft main began; None when this process does not see it."""
        draft = LocalDraft(self._root, name, token, self._disk, self._threads)
        return draft if draft.folder.is_dir() else None

    def recover(self, name: str) -> None:
        """Finish or undo what a crash of this run left behind: drafts and trash go, displaced checkpoints come back."""
        for entry in sorted(self._root.iterdir()) if self._root.is_dir() else []:
            hidden = _parse_hidden(entry.name)
            if hidden is None or not same_family(name, hidden[1]):
                continue
            what, owner = hidden
            if what in ("draft", "trash"):
                self._disk.remove_tree(entry)
            elif not self.path(owner).exists():
                self._disk.rename(entry, self.path(owner))
            else:
                retire(entry, self.path(owner), self._disk)

    def names(self) -> list[str]:
        """Folders with a manifest, and displaced ones whose successor never came."""
        found = set()
        for entry in self._root.iterdir() if self._root.is_dir() else []:
            hidden = _parse_hidden(entry.name)
            name = entry.name if hidden is None else hidden[1] if hidden[0] == "old" else None
            if name is not None and (entry / MANIFEST_NAME).is_file():
                found.add(name)
        return sorted(found)

    def folder(self, name: str) -> Path:
        """Where the checkpoint lies now, also when a crash came between the two renames of an overwrite."""
        path = self.path(name)
        if not path.exists() and self._root.is_dir():
            for entry in sorted(self._root.iterdir()):
                if _parse_hidden(entry.name) == ("old", name):
                    return entry
        return path

    def manifest(self, name: str) -> Manifest:
        """The verified manifest."""
        path = self.folder(name) / MANIFEST_NAME
        try:
            if path.stat().st_size > MAX_MANIFEST_BYTES:
                raise CorruptCheckpointError(
                    f"{path}: larger than any manifest; it was not read. Use another checkpoint."
                )
            return decode(path.read_bytes(), str(path))
        except FileNotFoundError as error:
            raise IncompleteCheckpointError(
                f"{path} does not exist, so {path.parent} is not a complete checkpoint of hasten: it was never "
                "committed, or another tool wrote it. Give another folder, or convert it with `hasten ckpt convert`."
            ) from error
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error}. Check the folder's permissions.") from error

    def complete(self, name: str) -> bool:
        """Whether the manifest is readable and every file is there with its size."""
        try:
            manifest = self.manifest(name)
            folder = self.folder(name)
            return all(inside(folder, file.name).stat().st_size == file.size for file in manifest.files)
        except (CheckpointError, OSError):  # what is wrong is said when it is loaded by name
            return False

    @contextmanager
    def fetch(self, name: str, files: Sequence[FileRecord]) -> Iterator[Path]:
        """The checkpoint's own folder: local files are read where they are."""
        folder = self.folder(name)
        for file in files:
            inside(folder, file.name)
        yield folder

    def delete(self, name: str) -> None:
        """Hide the checkpoint by one rename, then remove it."""
        trash = self._root / _hidden("trash", name, secrets.token_hex(6))
        self._disk.rename(self.path(name), trash)
        self._disk.sync_folder(self._root)
        self._disk.remove_tree(trash)


def retire(old: Path, new: Path, disk: Disk) -> None:
    """Remove a displaced checkpoint; what the user kept in its folder moves into the new one."""
    try:
        listed = {file.name for file in decode((old / MANIFEST_NAME).read_bytes(), str(old)).files} | {MANIFEST_NAME}
    except (OSError, CheckpointError):  # not a checkpoint: everything in it is the user's
        listed = set()
    for path in sorted(old.iterdir()):
        if path.is_dir() and any(name.startswith(path.name + "/") for name in listed):
            continue
        if path.name not in listed and not (new / path.name).exists():
            disk.rename(path, new / path.name)
    # Renamed first: a crash inside the removal must not make the rest look like files of the user.
    trash = old.with_name(old.name.replace(".hasten-old.", ".hasten-trash.", 1))
    disk.rename(old, trash)
    disk.remove_tree(trash)
