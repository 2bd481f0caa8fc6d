"""Opening untrusted files: regular files of a plausible size, never a pipe or a device."""

from __future__ import annotations

import os
import pickle
import stat
import struct
from pathlib import Path
from typing import BinaryIO, Final

from hasten.errors import CorruptCheckpointError, UnsafeCheckpointError

MAX_TABLE_BYTES: Final = 1024**3
"""Upper limit of a manifest, index or table; those of a model over ten thousand ranks have some 100 MB."""
FORGED: Final = (
    *(ArithmeticError, AssertionError, AttributeError, EOFError, ImportError, LookupError, MemoryError, OSError),
    *(RuntimeError, TypeError, ValueError, pickle.PickleError, struct.error),
)
"""Errors that readers of structured files raise for invalid content."""
_KINDS: Final = ((stat.S_ISDIR, "a folder"), (stat.S_ISFIFO, "a pipe"), (stat.S_ISSOCK, "a socket"))


def size_of(path: Path, most_bytes: int | None = None) -> int:
    """Return the size of a file that other code is about to open by its path.

    Raises: OSError when it does not exist; UnsafeCheckpointError for a pipe, socket, device or folder, which could
    block the reader or never end; CorruptCheckpointError above `most_bytes`.
    """
    return _checked(path, path.stat(), most_bytes)


def open_outside(path: Path, most_bytes: int | None = None) -> BinaryIO:
    """Open a regular file for reading without ever waiting for a writer.

    Raises: as `size_of`.
    """
    _checked(path, path.stat(), most_bytes)  # opening a device may already act on it
    flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0)
    descriptor = os.open(path, flags)
    try:
        _checked(path, os.fstat(descriptor), most_bytes)
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def read_outside(path: Path, most_bytes: int = MAX_TABLE_BYTES) -> bytes:
    """Read a whole file of at most `most_bytes`.

    Raises: as `size_of`.
    """
    with open_outside(path, most_bytes) as file:
        return file.read(most_bytes)


def _checked(path: Path, found: os.stat_result, most_bytes: int | None) -> int:
    if not stat.S_ISREG(found.st_mode):
        kind = next((words for test, words in _KINDS if test(found.st_mode)), "a device")
        raise UnsafeCheckpointError(
            f"{path} is {kind} where a file should be, and reading it could wait or run on forever. Nothing was read. Do not use "
            "this folder unless you know why it is there."
        )
    if most_bytes is not None and found.st_size > most_bytes:
        raise CorruptCheckpointError(
            f"{path} has {found.st_size} bytes, more than the {most_bytes} such a file can have; it was not read, since it would "
            "fill the memory. Use another copy of the checkpoint."
        )
    return found.st_size
