"""Locks of the file system: one around changes of a folder, and one that shows whether the writer of a draft is alive."""

from __future__ import annotations

import errno
import fcntl
import os
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from hasten.checkpoint.store.disk import Disk
from hasten.errors import CheckpointBusyError

LOCK_NAME: Final = ".hasten-lock"
_WAIT_S: Final = 60.0
_PAUSE_S: Final = 0.01
_ABANDONED_AFTER_S: Final = 24 * 3600.0
"""Age after which a draft counts as abandoned where the file system has no flock."""
_UNSUPPORTED: Final = frozenset({errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK})


class FileLock:
    """An flock on a file, until it is released, garbage-collected, or the process ends."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self._end = weakref.finalize(self, _unlock, descriptor, os.getpid())

    def release(self) -> None:
        """Release the lock; safe to call repeatedly."""
        self._end()


def _unlock(descriptor: int, owner: int) -> None:
    if os.getpid() == owner:  # explicitly, because forked children may hold copies of the descriptor
        with suppress(OSError):  # a file system without flock
            fcntl.flock(descriptor, fcntl.LOCK_UN)
    os.close(descriptor)


def try_lock(path: Path, disk: Disk) -> FileLock | None:
    """Create a file if necessary and lock it; return None if another process holds the lock."""
    descriptor = disk.open_lock(path)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    except OSError as error:
        if error.errno not in _UNSUPPORTED:
            os.close(descriptor)
            raise
    return FileLock(descriptor)


@contextmanager
def folder_lock(folder: Path, disk: Disk, wait_s: float = _WAIT_S) -> Iterator[None]:
    """Context manager in which no other process saves into the folder.

    Raises: CheckpointBusyError if another process holds the lock for longer than `wait_s`.
    """
    path = folder / LOCK_NAME
    deadline = time.monotonic() + wait_s
    while (lock := _lock_current_file(path, disk)) is None:
        if time.monotonic() > deadline:
            raise CheckpointBusyError(
                f"another process has kept {folder} locked for {wait_s:g} s while saving there. Nothing was changed. Look for a "
                f"stopped process (`fuser {path}`), or save into another folder."
            )
        time.sleep(_PAUSE_S)
    try:
        yield
    finally:
        disk.remove_file(path)
        lock.release()


def _lock_current_file(path: Path, disk: Disk) -> FileLock | None:
    """Return the lock, or None if it is held, or if its holder has removed the file meanwhile."""
    lock = try_lock(path, disk)
    if lock is None:
        return None
    with suppress(FileNotFoundError):
        if os.path.samestat(os.fstat(lock.descriptor), path.stat()):
            return lock
    lock.release()
    return None


def is_abandoned(lock_file: Path) -> bool:
    """Return True if the process that wrote a draft has ended, judged by the draft's lock file."""
    try:
        descriptor = os.open(lock_file, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return True
    except PermissionError:  # another user's
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # no flock here
        return time.time() - os.fstat(descriptor).st_mtime > _ABANDONED_AFTER_S
    finally:
        os.close(descriptor)
    return True
