"""Paths that users give: checked before anything is read or written."""

from __future__ import annotations

import os

from hasten.errors import ArgumentError


def check_path(path: object, what: str) -> None:
    """Return if `path` can name a file or folder.

    Raises: ArgumentError for another type, or text that no file system accepts.
    """
    text = os.fspath(path) if isinstance(path, (str, os.PathLike)) else path
    if not isinstance(text, str):
        raise ArgumentError(
            f"{what} got {path!r:.80} of type {type(path).__qualname__}, which names no place to read or write; give a path as a "
            f"string or pathlib.Path."
        )
    if "\0" in text:
        raise ArgumentError(
            f"{what} got the path {text!r:.200}, which contains a NUL character, and no file system accepts one; remove it."
        )
