"""Resolution of paths and URLs to a store and a checkpoint name."""

from __future__ import annotations

import logging
import os
from pathlib import Path

from hasten.checkpoint.base import CheckpointStore
from hasten.checkpoint.format.manifest import MANIFEST_NAME, checkpoint_number
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


log = logging.getLogger(__name__)


def is_url(location: str) -> bool:
    """Return True if `place` is a URL rather than a path."""
    scheme, url_mark, _ = location.partition("://")
    return bool(url_mark) and len(scheme) > 1


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
    if is_url(location_text):
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


def locate_existing(location: str | Path) -> tuple[CheckpointStore, str]:
    """Return the store and name of a checkpoint to be read.

    Raises: IncompleteCheckpointError when its folder does not exist or is a file.
    """
    store, name = locate(location)
    if isinstance(store, LocalStore):
        checkpoint_path = store.folder(name)
        if checkpoint_path.is_file():
            has_manifest = (checkpoint_path.parent / MANIFEST_NAME).is_file()
            if has_manifest:
                hint = f"give the folder it is in, {checkpoint_path.parent}"
            else:
                hint = "give such a folder"
            raise IncompleteCheckpointError(
                f"{location} is a file; a checkpoint is a folder with {MANIFEST_NAME} in it, as save_state writes it: {hint}."
            )
        if not checkpoint_path.exists():
            raise IncompleteCheckpointError(
                f"{location} does not exist, so there is no checkpoint to load. Check the path (the current folder is "
                f"{Path.cwd()}); `hasten ckpt list {checkpoint_path.parent}` shows what is there."
            )
    return store, name


def check_naming(output_dir: str | Path | None, is_automatic: bool | None) -> None:
    """Check that `automatic_checkpoint_naming` allows this target of save_state.

    Raises: ConfigError if naming is automatic and a folder is given, or not automatic and none is given.
    """
    if output_dir is not None and is_automatic:
        raise ConfigError(
            f"automatic_checkpoint_naming=True numbers every checkpoint under project_dir, but save_state({str(output_dir)!r}) "
            "names a folder; call save_state() without one, or leave automatic_checkpoint_naming out."
        )
    if output_dir is None and is_automatic is False:
        raise ConfigError(
            "save_state() got no folder and automatic_checkpoint_naming=False forbids a numbered one, so there is no place for "
            'the checkpoint; call save_state("folder"), or leave automatic_checkpoint_naming out.'
        )


def find_newest(store: CheckpointStore, log_level: int = logging.WARNING) -> str | None:
    """Return the name of the newest complete numbered checkpoint; incomplete and damaged ones are skipped, which is logged.

    Only a place without any numbered checkpoint gives None.
    Raises: IncompleteCheckpointError when none of them is complete; CheckpointError for a newer one that cannot be read now, and
    CheckpointVersionError for one of another version of hasten, because an older one would take the run back.
    """
    numbers_by_name = {
        checkpoint_name: checkpoint_number(checkpoint_name)
        for checkpoint_name in store.names()
    }
    checkpoint_names = sorted(
        (
            checkpoint_name
            for checkpoint_name in numbers_by_name
            if numbers_by_name[checkpoint_name] is not None
        ),
        key=lambda checkpoint_name: numbers_by_name[checkpoint_name] or 0,
        reverse=True,
    )
    load_errors: list[CheckpointError] = []
    for checkpoint_name in checkpoint_names:
        try:
            store.check(checkpoint_name)
        except (IncompleteCheckpointError, CorruptCheckpointError) as error:
            load_errors.append(error)
            continue
        if load_errors:
            log.log(
                log_level,
                "using %s in %s and skipping newer ones: %s",
                checkpoint_name,
                store.address,
                " ".join(str(load_error) for load_error in load_errors),
            )
        return checkpoint_name
    if not checkpoint_names:
        return None
    raise IncompleteCheckpointError(
        f"{store.address} has checkpoints ({', '.join(checkpoint_names[:4])}) and none is complete: {load_errors[0]} The run does not start anew over "
        f"them. `hasten ckpt verify` names all faults; delete {store.address} to start anew, or give the path of another checkpoint."
    )


def join_location(location: str, *path_parts: str) -> str:
    """Return a path or URL with further parts appended."""
    if is_url(location):
        return "/".join((location.rstrip("/"), *path_parts))
    return str(Path(location).joinpath(*path_parts))


def find_newest_of_all(store: CheckpointStore, agreement: Agreement) -> str | None:
    """Return the newest checkpoint that every rank has; None if no rank has any. Ranks: every rank.

    Raises: as `newest`; CheckpointError when ranks have none in common.
    """
    log_level = logging.WARNING if agreement.comm.rank == 0 else logging.DEBUG
    names_of_ranks: list[str | None] = agreement.share(find_newest(store, log_level))
    if len(set(names_of_ranks)) == 1:
        return names_of_ranks[0]
    # machines with separate disks
    numbers_of_ranks = [
        -1 if checkpoint_name is None else checkpoint_number(checkpoint_name) or 0
        for checkpoint_name in names_of_ranks
    ]
    oldest_name = names_of_ranks[numbers_of_ranks.index(min(numbers_of_ranks))]
    if oldest_name is None or not all(agreement.share(is_complete(store, oldest_name))):
        raise CheckpointError(
            f"ranks see different newest checkpoints ({sorted(map(str, set(names_of_ranks)))}), and have none in common. Give the path of "
            "one that every machine has."
        )
    if agreement.comm.rank == 0:
        log.warning(
            "ranks see different newest checkpoints (%s); %s is loaded, which all have",
            set(names_of_ranks),
            oldest_name,
        )
    return oldest_name


def is_complete(store: CheckpointStore, checkpoint_name: str) -> bool:
    """Return True if the manifest is readable and every file has its size."""
    try:
        store.check(checkpoint_name)
    except CheckpointError:  # loading it by name reports the problem
        return False
    return True
