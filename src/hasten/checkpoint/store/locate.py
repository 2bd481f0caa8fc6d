"""Resolution of paths and URLs to a store and a checkpoint name."""

from __future__ import annotations

import logging
import os
from pathlib import Path

from hasten.checkpoint.base import CheckpointStore, checkpoint_number
from hasten.checkpoint.format.manifest import MANIFEST_NAME
from hasten.checkpoint.store.local_store import LocalStore
from hasten.comm.agreement import Agreement
from hasten.errors import (
    ArgumentError,
    CheckpointError,
    ConfigError,
    CorruptCheckpointError,
    IncompleteCheckpointError,
)
from hasten.extension import load


def check_path(path: object, what: str) -> None:
    """Check that `path` can name a file or folder.

    Raises: ArgumentError for another type, for empty text, or text that no file system accepts.
    """
    text = os.fspath(path) if isinstance(path, (str, os.PathLike)) else path
    if not isinstance(text, str):
        raise ArgumentError(
            f"{what} got {path!r:.80} of type {type(path).__qualname__}, which names no place to read or write; give a path as a "
            f"string or pathlib.Path."
        )
    if not text.strip():
        raise ArgumentError(
            f'{what} got the empty path {text!r}, which would be the current folder; give the name of a folder or file, or "." if it is '
            "meant."
        )
    if "\0" in text:
        raise ArgumentError(
            f"{what} got the path {text!r:.200}, which contains a NUL character, and no file system accepts one; remove it."
        )


def check_local(path: str | os.PathLike[str], what: str) -> Path:
    """Return the path of a target on a local disk.

    Raises: ArgumentError as `check_path`, and for a URL.
    """
    check_path(path, what)
    scheme, mark, rest = os.fspath(path).partition("://")
    if mark and scheme == "file":
        return Path(rest).expanduser()
    if mark and len(scheme) > 1:
        raise ArgumentError(
            f"{what} got the URL {path}, and it writes to local folders only: a folder called {scheme}: would appear here. Write to a local "
            "folder and upload it; save_state takes URLs."
        )
    return Path(path).expanduser()


log = logging.getLogger(__name__)


def is_url(place: str) -> bool:
    """Return True if `place` is a URL rather than a path."""
    scheme, mark, _ = place.partition("://")
    return bool(mark) and len(scheme) > 1


def open_store(place: str | Path) -> CheckpointStore:
    """Return the store at a folder or URL (`file://` is a folder)."""
    check_path(place, "the checkpoint folder")
    text = str(place)
    if text.startswith("file://"):
        return LocalStore(text.removeprefix("file://"))
    return _open_url(text) if is_url(text) else LocalStore(Path(text))


def _open_url(url: str) -> CheckpointStore:
    store: CheckpointStore = load("stores", "url")(url)
    return store


def locate(place: str | Path) -> tuple[CheckpointStore, str]:
    """Return the store and name of one checkpoint, given its path or URL."""
    check_path(place, "the checkpoint folder")
    text = str(place).rstrip("/")
    if text.startswith("file://"):
        text = text.removeprefix("file://")
    if is_url(text):
        parent, _, name = text.rpartition("/")
        if not name or parent.endswith((":/", ":")):
            raise ConfigError(
                f"{place} names no folder in the storage; give a URL such as s3://bucket/run/checkpoint."
            )
        return _open_url(parent), name
    try:
        path = Path(text or "/").expanduser().resolve()
    except (OSError, RuntimeError) as error:
        raise CheckpointError(
            f"{place} cannot be followed: {error}. Give the path of a folder."
        ) from error
    if not path.name:
        raise ConfigError(
            f"{place} is the root of the file system; give a folder for the checkpoint."
        )
    return LocalStore(path.parent), path.name


def locate_existing(place: str | Path) -> tuple[CheckpointStore, str]:
    """Return the store and name of a checkpoint to be read.

    Raises: IncompleteCheckpointError when its folder does not exist or is a file.
    """
    store, name = locate(place)
    if isinstance(store, LocalStore):
        path = store.folder(name)
        if path.is_file():
            inside = (path.parent / MANIFEST_NAME).is_file()
            hint = (
                f"give the folder it is in, {path.parent}"
                if inside
                else "give such a folder"
            )
            raise IncompleteCheckpointError(
                f"{place} is a file; a checkpoint is a folder with {MANIFEST_NAME} in it, as save_state writes it: {hint}."
            )
        if not path.exists():
            raise IncompleteCheckpointError(
                f"{place} does not exist, so there is no checkpoint to load. Check the path (the current folder is "
                f"{Path.cwd()}); `hasten ckpt list {path.parent}` shows what is there."
            )
    return store, name


def check_naming(output_dir: str | Path | None, automatic: bool | None) -> None:
    """Check that `automatic_checkpoint_naming` allows this target of save_state.

    Raises: ConfigError if naming is automatic and a folder is given, or not automatic and none is given.
    """
    if output_dir is not None and automatic:
        raise ConfigError(
            f"automatic_checkpoint_naming=True numbers every checkpoint under project_dir, but save_state({str(output_dir)!r}) "
            "names a folder; call save_state() without one, or leave automatic_checkpoint_naming out."
        )
    if output_dir is None and automatic is False:
        raise ConfigError(
            "save_state() got no folder and automatic_checkpoint_naming=False forbids a numbered one, so there is no place for "
            'the checkpoint; call save_state("folder"), or leave automatic_checkpoint_naming out.'
        )


def newest(store: CheckpointStore, level: int = logging.WARNING) -> str | None:
    """Return the name of the newest complete numbered checkpoint; incomplete and damaged ones are skipped, which is logged.

    Only a place without any numbered checkpoint gives None.
    Raises: IncompleteCheckpointError when none of them is complete; CheckpointError for a newer one that cannot be read now, and
    CheckpointVersionError for one of another version of hasten, because an older one would take the run back.
    """
    numbers = {name: checkpoint_number(name) for name in store.names()}
    names = sorted(
        (name for name in numbers if numbers[name] is not None),
        key=lambda name: numbers[name] or 0,
        reverse=True,
    )
    faults: list[CheckpointError] = []
    for name in names:
        try:
            store.check(name)
        except (IncompleteCheckpointError, CorruptCheckpointError) as error:
            faults.append(error)
            continue
        if faults:
            log.log(
                level,
                "using %s in %s and skipping newer ones: %s",
                name,
                store.address,
                " ".join(str(fault) for fault in faults),
            )
        return name
    if not names:
        return None
    raise IncompleteCheckpointError(
        f"{store.address} has checkpoints ({', '.join(names[:4])}) and none is complete: {faults[0]} The run does not start anew over "
        f"them. `hasten ckpt verify` names all faults; delete {store.address} to start anew, or give the path of another checkpoint."
    )


def join_place(place: str, *parts: str) -> str:
    """Return a path or URL with further parts appended."""
    return (
        "/".join((place.rstrip("/"), *parts))
        if is_url(place)
        else str(Path(place).joinpath(*parts))
    )


def newest_of_all(store: CheckpointStore, together: Agreement) -> str | None:
    """Return the newest checkpoint that every rank has; None if no rank has any. Ranks: every rank.

    Raises: as `newest`; CheckpointError when ranks have none in common.
    """
    level = logging.WARNING if together.comm.rank == 0 else logging.DEBUG
    names: list[str | None] = together.share(newest(store, level))
    if len(set(names)) == 1:
        return names[0]
    # machines with separate disks
    numbers = [-1 if name is None else checkpoint_number(name) or 0 for name in names]
    oldest = names[numbers.index(min(numbers))]
    if oldest is None or not all(together.share(is_complete(store, oldest))):
        raise CheckpointError(
            f"ranks see different newest checkpoints ({sorted(map(str, set(names)))}), and have none in common. Give the path of "
            "one that every machine has."
        )
    if together.comm.rank == 0:
        log.warning(
            "ranks see different newest checkpoints (%s); %s is loaded, which all have",
            set(names),
            oldest,
        )
    return oldest


def is_complete(store: CheckpointStore, name: str) -> bool:
    """Return True if the manifest is readable and every file has its size."""
    try:
        store.check(name)
    except CheckpointError:  # loading it by name reports the problem
        return False
    return True
