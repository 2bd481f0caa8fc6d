"""Paths that users give: checked before anything is read or written."""

from __future__ import annotations

import os
from pathlib import Path

from hasten.errors import ArgumentError


def check_path(path: object, what: str) -> None:
    """Return if `path` can name a file or folder.

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
    """Return the path of something that is written to a local disk.

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
