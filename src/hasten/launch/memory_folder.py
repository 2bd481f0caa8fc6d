"""The folder in memory of one launch: outlives the processes it starts, ends with it, and nobody else may read it."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

_MEMORY: Final = Path("/dev/shm")  # where Linux keeps files in memory
_LOCK: Final = "launcher"


@contextmanager
def memory_folder(memory: Path = _MEMORY) -> Iterator[Path | None]:
    """A private folder for the time of the block; None where the system keeps no files in memory.

    The launcher holds a lock in it. What launchers left that were killed has no holder, and is removed first.
    """
    if not memory.is_dir() or not os.access(memory, os.W_OK):
        yield None
        return
    prefix = f"hasten-{os.geteuid()}-"
    for left in memory.glob(f"{prefix}*"):
        _remove_if_left(left)
    folder = Path(tempfile.mkdtemp(prefix=prefix, dir=memory))  # 0700
    descriptor = os.open(folder / _LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(descriptor)


def _remove_if_left(folder: Path) -> None:
    try:
        descriptor = os.open(folder / _LOCK, os.O_RDWR | os.O_CLOEXEC)
    except OSError:  # just being made, or another's
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder, ignore_errors=True)
    except BlockingIOError:  # its launcher runs
        return
    finally:
        os.close(descriptor)
