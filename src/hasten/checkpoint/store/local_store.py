"""Checkpoints in a folder: hidden drafts, made visible by one rename under a lock; and the store of a path or URL."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import secrets
import stat
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from hasten.checkpoint.base import Blob, CheckpointStore
from hasten.checkpoint.format.manifest import (
    CHUNK_BYTES,
    DRAFT_PREFIX,
    MANIFEST_NAME,
    MAX_MANIFEST_BYTES,
    FileRecord,
    Manifest,
    checkpoint_number,
    decode_manifest,
    draft_of,
    encode_manifest,
    missing_files,
    next_number,
    numbered_checkpoint,
    read_manifest,
    read_outside,
    resolve_inside,
)
from hasten.checkpoint.store.disk import (
    FULL_DISK_ERRORS,
    Disk,
    cannot_write,
    file_checksum,
    worker_pool,
    write_files,
)
from hasten.checkpoint.store.drafts import (
    LEFTOVERS,
    LOCK_NAME,
    TRASH_PREFIX,
    remove_leftovers,
    replace_content,
)
from hasten.errors import (
    ArgumentError,
    CheckpointBusyError,
    CheckpointError,
    ConfigError,
    IncompleteCheckpointError,
)
from hasten.extension import load

log = logging.getLogger(__name__)
_LOCK_TIMEOUT_S: Final = 60.0
_LOCK_POLL_S: Final = 0.01
_FLOCK_UNSUPPORTED_ERRORS: Final = frozenset(
    {errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK}
)


# -- locks --------------------------------------------------------------------------------------------------------
def _try_lock(lock_path: Path, disk: Disk) -> int | None:
    """Create a file if necessary and lock it; return its descriptor, or None if another process holds the lock."""
    descriptor = disk.open_lock(lock_path)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    except OSError as error:
        if error.errno not in _FLOCK_UNSUPPORTED_ERRORS:
            os.close(descriptor)
            raise
    return descriptor


def _unlock(descriptor: int | None, owner_pid: int) -> None:
    if descriptor is None:
        return
    # explicitly, because forked children may hold copies of the descriptor
    if os.getpid() == owner_pid:
        with suppress(OSError):  # a file system without flock
            fcntl.flock(descriptor, fcntl.LOCK_UN)
    os.close(descriptor)


@contextmanager
def folder_lock(
    folder: Path, disk: Disk, wait_s: float = _LOCK_TIMEOUT_S
) -> Iterator[None]:
    """Context manager in which no other process saves into the folder.

    Raises: CheckpointBusyError if another process holds the lock for longer than `wait_s`.
    """
    lock_path = folder / LOCK_NAME
    deadline_s = time.monotonic() + wait_s
    while True:
        descriptor = _try_lock(lock_path, disk)
        if descriptor is not None:
            # the previous holder may have removed the file meanwhile
            with suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(descriptor), lock_path.stat()):
                    break
            _unlock(descriptor, os.getpid())
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
            _unlock(descriptor, os.getpid())


# -- drafts -------------------------------------------------------------------------------------------------------
def _create_draft(
    base_folder: Path, checkpoint_name: str | None, disk: Disk, at_least: int = 0
) -> tuple[Path, int | None]:
    """Create a draft inside a folder, after removing leftovers of interrupted saves; return it and its lock.

    Without a name, the checkpoint gets the next free number from `at_least` on.

    It is a folder for the files, with the final name, in a hidden one, whose lock shows that the writer is alive.
    """
    disk.make_folder(base_folder)
    with folder_lock(base_folder, disk):
        if any(base_folder.glob(LEFTOVERS)):
            remove_leftovers(base_folder, disk)
        if checkpoint_name is None:
            used_names: list[str] = []
            # drafts first: one that another run commits meanwhile is among the checkpoints then
            for hidden_folder in base_folder.glob(f"{DRAFT_PREFIX}*"):
                with suppress(FileNotFoundError):
                    used_names += [path.name for path in hidden_folder.iterdir()]
            used_names += LocalStore(base_folder).names()
            checkpoint_name = numbered_checkpoint(next_number(used_names, at_least))
        hidden_folder = base_folder / f"{DRAFT_PREFIX}{secrets.token_hex(6)}"
        draft_folder = hidden_folder / checkpoint_name
        disk.make_folder(hidden_folder)
        draft_lock = _try_lock(hidden_folder / LOCK_NAME, disk)
        disk.make_folder(draft_folder)
    return draft_folder, draft_lock


@contextmanager
def temporary_draft(folder: Path, disk: Disk) -> Iterator[Path]:
    """Context manager for files that are renamed from a draft into `folder` one by one; what is left is removed."""
    draft_folder, draft_lock = _create_draft(folder, "files", disk)
    try:
        yield draft_folder
    finally:
        _unlock(draft_lock, os.getpid())
        disk.remove_tree(draft_folder.parent)


class LocalDraft:
    """Draft next to the checkpoint it will become, or inside the folder whose content it will replace."""

    def __init__(
        self,
        target: Path,
        folder: Path,
        lock: int | None,
        disk: Disk,
        threads: int | None = None,
    ) -> None:
        """Open the draft in `folder`; `lock` is its lock on the rank that created it."""
        self.name = target.name
        self.token = folder.parent.name
        self.folder = folder
        """The folder that hooks see; it has the checkpoint's name."""
        self.is_numbered = False
        """True if the name was chosen by the store; then the checkpoint never replaces another."""
        self.keeps_exports = True
        """False if the save may replace an exported model in its folder."""
        self._target = target
        self._release = weakref.finalize(self, _unlock, lock, os.getpid())
        self._disk = disk
        self._threads = threads

    def put(self, files: Mapping[str, Blob]) -> dict[str, FileRecord]:
        """Write files in parallel; they are on the disk when this returns."""
        try:
            self._disk.make_folder(self.folder)  # a hook may have removed it
            for file_name in files:
                file_path = self.folder / file_name
                if file_path.is_symlink() or file_path.exists():
                    log.warning(
                        "%s, which a save hook wrote, is replaced by the file of that name this save writes",
                        file_name,
                    )
                    if file_path.is_dir():
                        self._disk.remove_tree(file_path)
                    else:
                        self._disk.remove_file(file_path)
            return write_files(self.folder, files, self._disk, self._threads)
        except OSError as error:
            self._explain_full_disk(error, sum(blob.size for blob in files.values()))
            raise

    def hook_files(self, written_names: Sequence[str]) -> list[FileRecord]:
        """Return the records of files that hooks created in the draft, after syncing them."""
        hook_records = []
        try:
            for path in sorted(self.folder.rglob("*")):
                file_name = path.relative_to(self.folder).as_posix()
                if path.is_dir() and not path.is_symlink():
                    self._disk.sync_folder(path)
                elif file_name not in written_names:
                    with check_hooked(self.folder, file_name).open("rb") as file:
                        self._disk.sync(file.fileno())
                    hook_records.append(describe_file(path, file_name, self._threads))
        except OSError as error:
            self._explain_full_disk(error)
            raise
        return hook_records

    def commit(self, manifest: Manifest) -> None:
        """Write the manifest, sync, and rename the folder to its final name or replace the existing content."""
        raw_manifest = encode_manifest(manifest)
        manifest_blob = Blob([raw_manifest], len(raw_manifest))
        try:
            write_files(
                self.folder, {MANIFEST_NAME: manifest_blob}, self._disk, threads=1
            )
            for folder in (self.folder, *self.folder.parents[:2]):
                self._disk.sync_folder(folder)
            if missing_names := missing_files(self.folder, manifest.files):
                raise CheckpointError(
                    f"{', '.join(missing_names[:4])} disappeared from {self.folder} before the checkpoint was committed. Nothing was saved. "
                    "Find out what deletes files there (a clean-up job?), and save again."
                )
            if self.folder.parents[1] == self._target or not self._rename_to_target():
                with folder_lock(self._target, self._disk):
                    self._release()
                    replace_content(
                        self._target,
                        self.folder,
                        manifest,
                        self.keeps_exports,
                        self._disk,
                    )
        except OSError as error:
            self._explain_full_disk(error, len(raw_manifest))
            raise

    def _rename_to_target(self) -> bool:
        """Rename the draft to the checkpoint; if a folder of that name has appeared, move the draft into it instead."""
        try:
            self._disk.rename(self.folder, self._target)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.EBUSY):
                raise
            if self.is_numbered:
                raise CheckpointError(
                    f"another process has written {self._target} during this save. Nothing of it was changed, and nothing was saved. "
                    "Give each run its own project_dir, and save again."
                ) from error
            self._disk.rename(self.folder.parent, self._target / self.token)
            self.folder = self._target / self.token / self.name
            self._disk.sync_folder(self._target)
            return False
        self._disk.sync_folder(self._target.parent)
        try:
            # first, because NFS and FUSE keep open files in their folder
            self._release()
            self._disk.remove_tree(self.folder.parent)
        # the checkpoint is there; the next save removes the draft
        except OSError as error:
            log.debug("%s could not be removed now: %s", self.folder.parent, error)
        return True

    def abort(self) -> None:
        """Delete the draft, unless it has become the checkpoint: then the next save completes the replacement."""
        self._release()
        committed_draft = draft_of(read_manifest(self._target / MANIFEST_NAME))
        if committed_draft is None or not committed_draft.startswith(f"{self.token}/"):
            self._disk.remove_tree(self.folder.parent)

    def _explain_full_disk(self, error: OSError, num_bytes: int = 0) -> None:
        """Raise CheckpointError in place of an error for lack of space."""
        if error.errno in FULL_DISK_ERRORS:
            raise cannot_write(
                f"the checkpoint {self.name!r}",
                self.folder.parents[1],
                num_bytes,
                error,
            ) from error


def check_hooked(folder: Path, file_name: str) -> Path:
    """Return the path of a file that a hook created in the draft, if it can be part of a checkpoint.

    Raises: CheckpointError otherwise.
    """
    file_path = resolve_inside(folder, file_name)
    if file_name == MANIFEST_NAME:
        raise CheckpointError(
            f"a save hook wrote {MANIFEST_NAME}, the table of contents that every checkpoint has and hasten writes itself. "
            "Nothing was saved. Let the hook use another name."
        )
    if not stat.S_ISREG(file_path.stat().st_mode):
        raise CheckpointError(
            f"{file_name}, left by a save hook, is not a plain file, so it cannot be part of a checkpoint. Nothing was saved. "
            "Let the hook write files and folders."
        )
    return file_path


def describe_file(path: Path, file_name: str, threads: int | None = None) -> FileRecord:
    """Return the record of an existing file."""
    file_size = path.stat().st_size
    chunk_starts = range(0, file_size, CHUNK_BYTES)
    with worker_pool("hasten-describe", max_threads=threads) as thread_pool:
        chunk_sums = tuple(
            thread_pool.map(
                lambda start: file_checksum(
                    path, start, min(start + CHUNK_BYTES, file_size)
                ),
                chunk_starts,
            )
        )
    return FileRecord(name=file_name, size=file_size, sums=chunk_sums)


class LocalStore:
    """Checkpoints as folders of `root`, which all ranks of a machine share."""

    def __init__(
        self, root: str | Path, disk: Disk | None = None, threads: int | None = None
    ) -> None:
        self._root = Path(root).expanduser().absolute()
        self.address = str(self._root)
        self.remote = False
        self._disk = disk or Disk()
        self._threads = threads

    def path(self, name: str) -> Path:
        """Return the folder of a checkpoint."""
        return self._root / name

    def begin(self, name: str) -> LocalDraft:
        """Return a new draft, after removing leftovers of interrupted saves.

        An existing folder is never moved: the draft is created inside it, and its content is replaced.
        """
        target = base_folder = self._root / name
        try:
            if target.is_file():
                raise NotADirectoryError(f"{target} is a file")
            if not target.is_dir():
                base_folder = self._root
            elif any(self._root.glob(".hasten-*")):
                # the folder may be in one that cannot be written to
                with suppress(OSError), folder_lock(self._root, self._disk):
                    remove_leftovers(self._root, self._disk)
            draft = _create_draft(base_folder, name, self._disk)
        except OSError as error:
            raise self._explain_start(name, error) from error
        return LocalDraft(target, *draft, self._disk, self._threads)

    def begin_numbered(self, at_least: int) -> LocalDraft:
        """Return a new draft with the next free number, which no other process gets."""
        try:
            folder, lock = _create_draft(self._root, None, self._disk, at_least)
        except OSError as error:
            raise self._explain_start(numbered_checkpoint(at_least), error) from error
        target = self._root / folder.name
        draft = LocalDraft(target, folder, lock, self._disk, self._threads)
        draft.is_numbered = True
        return draft

    def _explain_start(self, name: str, error: OSError) -> CheckpointError:
        if error.errno in FULL_DISK_ERRORS:
            return cannot_write(f"the checkpoint {name!r}", self._root, 0, error)
        return CheckpointError(
            f"cannot start the checkpoint {name!r} in {self._root}: {error}. Nothing was changed. Give a folder "
            "that can be written to."
        )

    def join(self, name: str, token: str) -> LocalDraft | None:
        """Return the draft that main started; None when this process does not see it."""
        for base_folder in (self._root, self._root / name):
            if (base_folder / token / name).is_dir():
                return LocalDraft(
                    self._root / name,
                    base_folder / token / name,
                    None,
                    self._disk,
                    self._threads,
                )
        return None

    def names(self) -> list[str]:
        """Return the names of the entries that are checkpoints, by manifest or by number, complete or not."""
        checkpoint_names = []
        try:
            folder_entries = list(self._root.iterdir())
        except OSError as error:
            if not os.path.lexists(self._root):
                return []
            raise CheckpointError(
                f"{self._root} cannot be read: {error}. It may hold checkpoints, so the run does not go on without them. Check "
                "that the disk is mounted and the folder's permissions."
            ) from error
        for folder_entry in folder_entries:
            is_hidden = folder_entry.name.startswith(".hasten-")
            if not is_hidden and (
                checkpoint_number(folder_entry.name) is not None
                or (folder_entry / MANIFEST_NAME).is_file()
            ):
                checkpoint_names.append(folder_entry.name)
        return sorted(checkpoint_names)

    def manifest(self, name: str) -> Manifest:
        """Return the verified manifest."""
        return self.open_manifest(name)[0]

    def open_manifest(self, name: str) -> tuple[Manifest, Path]:
        """Return the verified manifest and the folder with its files, also after a crash while content was being replaced."""
        folder = missing_folder = self._root / name
        while True:
            manifest_path = folder / MANIFEST_NAME
            try:
                manifest = decode_manifest(
                    read_outside(manifest_path, MAX_MANIFEST_BYTES), str(manifest_path)
                )
            except FileNotFoundError as error:
                # it was being replaced, unless the same file is missing again
                if folder != missing_folder:
                    missing_folder = folder
                    folder = self._root / name
                    continue
                raise IncompleteCheckpointError(
                    f"{manifest_path} does not exist, so {manifest_path.parent} is not a complete checkpoint of hasten: it was never "
                    "committed, or another tool wrote it. Give another folder, or convert it with `hasten ckpt convert`."
                ) from error
            except NotADirectoryError as error:
                raise IncompleteCheckpointError(
                    f"{folder} is a file, and a checkpoint is a folder. Move or delete the file, or give the path of a checkpoint."
                ) from error
            except OSError as error:
                raise CheckpointError(
                    f"{manifest_path} cannot be read: {error}. Check the folder's permissions."
                ) from error
            draft_path = draft_of(manifest)
            if draft_path is None:
                return manifest, folder
            folder = self._root / name / draft_path

    def check(self, name: str) -> Manifest:
        """Return the manifest after checking that every file has its size. Raises: a CheckpointError otherwise."""
        while True:
            manifest, folder = self.open_manifest(name)
            missing_names = missing_files(folder, manifest.files)
            if not missing_names:
                return manifest
            if self.is_current(name, manifest, folder):
                raise IncompleteCheckpointError(
                    f"{folder}: {', '.join(missing_names[:4])} of {len(manifest.files)} files are missing or have another size, so it is not "
                    "complete. Load an earlier checkpoint, or delete this one."
                )

    def is_current(
        self, name: str, manifest: Manifest, folder: Path | None = None
    ) -> bool:
        """Return True if the checkpoint has not been replaced since its manifest, and its folder if given, were read."""
        try:
            current_manifest, current_folder = self.open_manifest(name)
        except CheckpointError:
            return False
        return current_manifest == manifest and folder in (None, current_folder)

    @contextmanager
    def fetch(self, name: str, manifest: Manifest) -> Iterator[Path]:
        """The checkpoint's folder: local files are read in place."""
        _, folder = self.open_manifest(name)
        for file in manifest.files:
            resolve_inside(folder, file.name)
        yield folder

    def delete(self, name: str) -> None:
        """Hide the checkpoint by one rename, then remove it."""
        trash_folder = self._root / f"{TRASH_PREFIX}{secrets.token_hex(6)}"
        self._disk.rename(self.path(name), trash_folder)
        self._disk.sync_folder(self._root)
        try:
            self._disk.remove_tree(trash_folder)
        except OSError as error:
            if error.errno != errno.ENOTEMPTY:
                raise
            log.debug(
                "%s is still open somewhere and will be removed by a later save: %s",
                trash_folder,
                error,
            )


# -- paths and URLs -----------------------------------------------------------------------------------------------
def check_path(path: object, caller: str) -> None:
    """Check that `path` can name a file or folder.

    Raises: ArgumentError for another type, for empty text, or text that no file system accepts.
    """
    path_text = os.fspath(path) if isinstance(path, (str, os.PathLike)) else path
    if not isinstance(path_text, str):
        raise ArgumentError(
            f"{caller} got {path!r:.80} of type {type(path).__qualname__}, which names no place to read or write; give a path as a "
            f"string or pathlib.Path."
        )
    if not path_text.strip():
        raise ArgumentError(
            f'{caller} got the empty path {path_text!r}, which would be the current folder; give the name of a folder or file, or "." if it is '
            "meant."
        )
    if "\0" in path_text:
        raise ArgumentError(
            f"{caller} got the path {path_text!r:.200}, which contains a NUL character, and no file system accepts one; remove it."
        )


def check_local(path: str | os.PathLike[str], caller: str) -> Path:
    """Return the path of a target on a local disk.

    Raises: ArgumentError as `check_path`, and for a URL.
    """
    check_path(path, caller)
    scheme, url_mark, url_path = os.fspath(path).partition("://")
    if url_mark and scheme == "file":
        return Path(url_path).expanduser()
    if url_mark and len(scheme) > 1:
        raise ArgumentError(
            f"{caller} got the URL {path}, and it writes to local folders only: a folder called {scheme}: would appear here. Write to a local "
            "folder and upload it; save_state takes URLs."
        )
    return Path(path).expanduser()


def is_url(location: str) -> bool:
    """Return True if `place` is a URL rather than a path."""
    scheme, url_mark, _ = location.partition("://")
    return bool(url_mark) and len(scheme) > 1


def join_location(location: str, *path_parts: str) -> str:
    """Return a path or URL with further parts appended."""
    if is_url(location):
        return "/".join((location.rstrip("/"), *path_parts))
    return str(Path(location).joinpath(*path_parts))


def open_store(location: str | Path) -> CheckpointStore:
    """Return the store at a folder or URL (`file://` is a folder)."""
    check_path(location, "the checkpoint folder")
    location_text = str(location)
    if location_text.startswith("file://"):
        return LocalStore(location_text.removeprefix("file://"))
    if is_url(location_text):
        return _open_url(location_text)
    return LocalStore(Path(location_text))


def _open_url(url: str) -> CheckpointStore:
    store: CheckpointStore = load("stores", "url")(url)
    return store


def locate(location: str | Path) -> tuple[CheckpointStore, str]:
    """Return the store and name of one checkpoint, given its path or URL."""
    check_path(location, "the checkpoint folder")
    location_text = str(location).rstrip("/")
    if location_text.startswith("file://"):
        location_text = location_text.removeprefix("file://")
    scheme, url_mark, _ = location_text.partition("://")
    if url_mark and len(scheme) > 1:
        parent_url, _, name = location_text.rpartition("/")
        if not name or parent_url.endswith((":/", ":")):
            raise ConfigError(
                f"{location} names no folder in the storage; give a URL such as s3://bucket/run/checkpoint."
            )
        return _open_url(parent_url), name
    try:
        checkpoint_path = Path(location_text or "/").expanduser().resolve()
    except (OSError, RuntimeError) as error:
        raise CheckpointError(
            f"{location} cannot be followed: {error}. Give the path of a folder."
        ) from error
    if not checkpoint_path.name:
        raise ConfigError(
            f"{location} is the root of the file system; give a folder for the checkpoint."
        )
    return LocalStore(checkpoint_path.parent), checkpoint_path.name
