"""Resolution of paths and URLs to a store and a checkpoint name."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Sequence
from pathlib import Path

from hasten.checkpoint.base import CheckpointStore
from hasten.checkpoint.format.manifest import MANIFEST_NAME
from hasten.checkpoint.store.local_store import LocalStore
from hasten.checkpoint.store.remote_store import RemoteStore
from hasten.comm.agreement import Agreement
from hasten.errors import ArgumentError, CheckpointError, ConfigError, IncompleteCheckpointError


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
_NUMBERED = re.compile(r"checkpoint_(\d+)")


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
    return RemoteStore(text) if is_url(text) else LocalStore(Path(text))


def locate(place: str | Path) -> tuple[CheckpointStore, str]:
    """Return the store and name of one checkpoint, given its path or URL."""
    check_path(place, "the checkpoint folder")
    text = str(place).rstrip("/")
    if text.startswith("file://"):
        text = text.removeprefix("file://")
    if is_url(text):
        parent, _, name = text.rpartition("/")
        if not name or parent.endswith((":/", ":")):
            raise ConfigError(f"{place} names no folder in the storage; give a URL such as s3://bucket/run/checkpoint.")
        return RemoteStore(parent), name
    path = Path(text or "/").expanduser().resolve()
    if not path.name:
        raise ConfigError(f"{place} is the root of the file system; give a folder for the checkpoint.")
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
            hint = f"give the folder it is in, {path.parent}" if inside else "give such a folder"
            raise IncompleteCheckpointError(
                f"{place} is a file; a checkpoint is a folder with {MANIFEST_NAME} in it, as save_state writes it: {hint}."
            )
        if not path.exists():
            raise IncompleteCheckpointError(
                f"{place} does not exist, so there is no checkpoint to load. Check the path (the current folder is "
                f"{Path.cwd()}); `hasten ckpt list {path.parent}` shows what is there."
            )
    return store, name


def newer_incomplete(store: CheckpointStore, chosen: str) -> list[str]:
    """Return numbered checkpoints newer than `chosen` that are incomplete (after a crash or a copy), oldest first."""
    names = set(store.names())
    root = Path(store.address)
    if isinstance(store, LocalStore) and root.is_dir():
        names |= {entry.name for entry in root.iterdir() if entry.is_dir()}
    least = number_of(chosen) or 0
    newer = sorted((n, name) for name in names if (n := number_of(name)) is not None and n > least)
    return [name for _, name in newer if not store.complete(name)]


def warn_of_incomplete(store: CheckpointStore, chosen: str) -> None:
    """Log a warning that names the newer, incomplete checkpoints that are skipped."""
    if skipped := newer_incomplete(store, chosen):
        log.warning(
            "using %s in %s and skipping newer ones: %s (no manifest, or not all files, as after a crash or a copy "
            "that did not end)",
            chosen,
            store.address,
            ", ".join(skipped),
        )


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


def numbered(number: int) -> str:
    """Return the name of an automatically numbered checkpoint."""
    return f"checkpoint_{number}"


def number_of(name: str) -> int | None:
    """Return the number in an automatic name; None for other names."""
    found = _NUMBERED.fullmatch(name)
    return int(found[1]) if found else None


def next_number(names: Sequence[str], at_least: int) -> int:
    """Return a number above all numbers in use, and not below `at_least`."""
    return max([at_least, *(n + 1 for name in names if (n := number_of(name)) is not None)])


def newest(store: CheckpointStore) -> str:
    """Return the name of the newest complete checkpoint.

    Raises: IncompleteCheckpointError when there is none, naming the incomplete ones.
    """
    found = sorted(((n, name) for name in store.names() if (n := number_of(name)) is not None), reverse=True)
    for _, name in found:
        if store.complete(name):
            return name
    seen = f"found only incomplete ones ({', '.join(name for _, name in found)})" if found else "found none"
    raise IncompleteCheckpointError(
        f"there is no complete checkpoint in {store.address}: {seen}. Save one first, or give the path of another."
    )


def join_place(place: str, *parts: str) -> str:
    """Return a path or URL with further parts appended."""
    return "/".join((place.rstrip("/"), *parts)) if is_url(place) else str(Path(place).joinpath(*parts))


def newest_of_all(store: CheckpointStore, together: Agreement) -> str:
    """Return the newest checkpoint that every rank has. Ranks: every rank.

    Raises: IncompleteCheckpointError when there is none; CheckpointError when ranks have none in common.
    """
    name = newest(store)
    seen: list[str] = together.share(name)
    is_main = together.comm.rank == 0
    if len(set(seen)) > 1:  # machines with separate disks: take the newest checkpoint that all of them have
        name = min(seen, key=lambda item: number_of(item) or 0)
        if not all(together.share(store.complete(name))):
            raise CheckpointError(
                f"ranks see different newest checkpoints ({sorted(set(seen))}) and {name} is not complete "
                "everywhere. Give the path of one that every machine has."
            )
        if is_main:
            log.warning(
                "ranks see different newest checkpoints (%s); %s is loaded, which all have", sorted(set(seen)), name
            )
    if is_main:
        warn_of_incomplete(store, name)
    return name


def newest_step(root: str) -> int | None:
    """Return the step of the newest complete checkpoint in a folder, as this rank sees it; None when there is none."""
    try:
        store = open_store(root)
        return store.manifest(newest(store)).step or 0
    except (CheckpointError, OSError):  # reported when the checkpoint is loaded
        return None
