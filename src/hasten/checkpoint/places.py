"""Where a checkpoint goes or comes from: paths and URLs become a store and a name."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from hasten.checkpoint.base import CheckpointStore
from hasten.checkpoint.local_store import LocalStore
from hasten.checkpoint.remote_store import RemoteStore, is_url
from hasten.errors import ConfigError, IncompleteCheckpointError

_NUMBERED = re.compile(r"checkpoint_(\d+)")


def open_store(place: str | Path) -> CheckpointStore:
    """The store at a folder or URL (`file://` is a folder)."""
    text = str(place)
    if text.startswith("file://"):
        return LocalStore(text.removeprefix("file://"))
    return RemoteStore(text) if is_url(text) else LocalStore(Path(text))


def locate(place: str | Path) -> tuple[CheckpointStore, str]:
    """The store and name of one checkpoint given by its own path or URL."""
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


def numbered(number: int) -> str:
    """The name of an automatically numbered checkpoint."""
    return f"checkpoint_{number}"


def number_of(name: str) -> int | None:
    """The number in an automatic name; None for other names."""
    found = _NUMBERED.fullmatch(name)
    return int(found[1]) if found else None


def next_number(names: Sequence[str], at_least: int) -> int:
    """A number above all that were ever used here."""
    return max([at_least, *(n + 1 for name in names if (n := number_of(name)) is not None)])


def newest(store: CheckpointStore) -> str:
    """The name of the newest complete checkpoint.

    Raises: IncompleteCheckpointError when there is none, naming what is there.
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
    """A path or URL below another."""
    return "/".join((place.rstrip("/"), *parts)) if is_url(place) else str(Path(place).joinpath(*parts))
