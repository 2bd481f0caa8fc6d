"""Lock files of writers, in local folders and remote stores."""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from hasten.checkpoint.store.disk import Disk
from hasten.checkpoint.store.outside_files import open_outside
from hasten.checkpoint.store.writer_lock import (
    MAX_OWNER_BYTES,
    Claim,
    Liveness,
    Lock,
    Owner,
    Patience,
    decode_owner,
    encode_owner,
    liveness,
    this_process,
)

_HIDDEN = re.compile(r"\.hasten-(draft|trash|lock|claim)\.(.+)\.([0-9a-f]+)")
_LONGEST = 150


class Hidden(NamedTuple):
    """The parts of a hidden entry's name: its purpose, the checkpoint, and the token of the save it belongs to."""

    what: str
    tag: str
    token: str


def hidden(what: str, name: str, token: str) -> str:
    """Return the name of a hidden entry of a checkpoint."""
    return f".hasten-{what}.{tag_of(name)}.{token}"


def tag_of(name: str) -> str:
    """Return the checkpoint's name as used in hidden names: shortened when it is too long for a file name."""
    if len(name.encode()) <= _LONGEST:
        return name
    return f"{name[: _LONGEST // 4]}~{hashlib.sha256(name.encode()).hexdigest()[:16]}"


def parse_hidden(entry: str) -> Hidden | None:
    """Return the parts of a name in a folder; None when it is not a hidden entry of hasten."""
    found = _HIDDEN.fullmatch(entry)
    return Hidden(found[1], found[2], found[3]) if found else None


def hidden_entries(folder: Path) -> Iterator[tuple[Path, Hidden]]:
    """Yield the hidden entries of a folder, in order; none when the folder does not exist."""
    try:
        names = sorted(path.name for path in folder.iterdir() if path.name.startswith(".hasten-"))
    except (FileNotFoundError, NotADirectoryError):
        return
    for name in names:
        if (found := parse_hidden(name)) is not None:
            yield folder / name, found


class LocalLocks:
    """Lock files of one folder."""

    def __init__(self, folder: Path, disk: Disk, patience: Patience | None = None, here: Owner | None = None) -> None:
        self._folder = folder
        self._disk = disk
        self.patience = patience or Patience()
        self.here = here or this_process()

    def put(self, name: str, token: str) -> Claim:
        """Create a lock of this process; the file appears under its name once it is written and locked."""
        path = self._folder / hidden("lock", name, token)
        fd = self._disk.put_lock(self._folder / hidden("claim", name, token), path, self._content)

        def beat() -> bool:
            if there := path.exists():
                os.utime(path)
            return there

        held = [fd]  # emptied on release: the number of a closed descriptor may be in use for another file

        def let_go() -> None:
            try:
                self._disk.remove_file(path)
            finally:
                if held:
                    unlock(held.pop())

        try:
            return Claim(token, path.exists, let_go, beat)
        except BaseException:
            let_go()
            raise

    def _content(self, locked: bool) -> bytes:
        return encode_owner(msgspec.structs.replace(self.here, locked=locked))

    def found(self, name: str) -> list[Lock]:
        """Return all locks of a checkpoint."""
        tag = tag_of(name)
        entries = [(path, entry) for path, entry in hidden_entries(self._folder) if entry.what == "lock"]
        locks = (self.lock_at(path, entry.token) for path, entry in entries if entry.tag == tag)
        return [lock for lock in locks if lock is not None]

    def lock_at(self, path: Path, token: str) -> Lock | None:
        """Return the lock in a file; None when the file does not exist."""
        try:
            with open_outside(path) as file:
                return Lock(token, decode_owner(file.read(MAX_OWNER_BYTES)), (os.fstat(file.fileno()).st_mtime, 0))
        except FileNotFoundError:
            return None
        except OSError:  # exists but cannot be read: it belongs to another user
            return Lock(token, Owner(), (path.stat().st_mtime, 0))

    def judge(self, name: str, lock: Lock) -> Liveness:
        """Return the liveness of the owner, judged by its process id and, where supported, by its flock."""
        verdict = liveness(lock.owner, self.here)
        if verdict is Liveness.DEAD or not lock.owner.locked:
            return verdict
        free = lock_is_free(self._folder / hidden("lock", name, lock.token))
        if free is False:
            return Liveness.RUNNING
        # some network file systems apply flocks within one machine only
        if free and lock.owner.same_machine(self.here):
            return Liveness.DEAD  # also a lock that a running process released and could not delete
        return verdict

    def remove(self, name: str, token: str) -> None:
        """Delete the lock of a dead owner."""
        self._disk.remove_file(self._folder / hidden("lock", name, token))


def lock_is_free(path: Path) -> bool | None:
    """Return True if no process holds an flock on a file; None when the file system cannot tell."""
    try:
        fd = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0))
    except FileNotFoundError:
        return True
    except OSError:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    finally:
        os.close(fd)
    return True


def unlock(fd: int) -> None:
    """Release an flock and close; forked children keep the descriptor, but no longer the lock."""
    try:
        fcntl.flock(fd, fcntl.LOCK_UN)
    except OSError:  # a file system without flock
        pass
    finally:
        os.close(fd)


class RemoteLocks:
    """Lock files under one URL."""

    def __init__(
        self,
        fs: Any,  # Any: an fsspec file system, which has no types
        root: str,
        patience: Patience | None = None,
        here: Owner | None = None,
    ) -> None:
        self._fs = fs
        self._root = root.rstrip("/")
        self.patience = patience or Patience()
        self.here = here or this_process()

    def _path(self, name: str, token: str) -> str:
        return f"{self._root}/{hidden('lock', name, token)}"

    def put(self, name: str, token: str) -> Claim:
        """Create a lock of this process."""
        fs, path, beats = self._fs, self._path(name, token), iter(range(1, 2**62))
        owner = self.here
        fs.pipe_file(path, encode_owner(owner))

        def there() -> bool:
            fs.invalidate_cache()
            return bool(fs.exists(path))

        def beat() -> bool:
            if not there():  # considered dead by another process: writing it again would make two owners
                return False
            fs.pipe_file(path, encode_owner(msgspec.structs.replace(owner, beat=next(beats), beat_s=time.time())))
            return True

        def let_go() -> None:
            if there():
                fs.rm_file(path)

        return Claim(token, there, let_go, beat)

    def entries(self) -> list[Hidden]:
        """Return all locks under the URL, from one listing."""
        self._fs.invalidate_cache()
        try:
            names = [str(entry["name"]).rpartition("/")[2] for entry in self._fs.ls(self._root, detail=True)]
        except FileNotFoundError:
            return []
        return [entry for entry in map(parse_hidden, names) if entry is not None and entry.what == "lock"]

    def found(self, name: str) -> list[Lock]:
        """Return all locks of a checkpoint."""
        tag = tag_of(name)
        locks = (self.lock_at(name, entry.token) for entry in self.entries() if entry.tag == tag)
        return [lock for lock in locks if lock is not None]

    def lock_at(self, name: str, token: str) -> Lock | None:
        """Return the lock of one save; None when it does not exist."""
        try:
            owner = decode_owner(self._fs.cat_file(self._path(name, token)))
        except FileNotFoundError:
            return None
        return Lock(token, owner, (owner.beat_s, owner.beat))

    def judge(self, name: str, lock: Lock) -> Liveness:
        """Return the liveness of the owner, which is unknown unless it is a process of this machine."""
        return liveness(lock.owner, self.here)

    def remove(self, name: str, token: str) -> None:
        """Delete the lock of a dead owner."""
        try:
            self._fs.rm_file(self._path(name, token))
        except FileNotFoundError:  # another process deleted it first
            return
