"""Lock objects at a URL: renewed again and again, since storage services do not tell whether a client still lives."""

from __future__ import annotations

import time
from typing import Any

import msgspec

from hasten.checkpoint.store.local_locks import Hidden, hidden, parse_hidden, tag_of
from hasten.checkpoint.store.ownership import (
    Liveness,
    Owner,
    Patience,
    decode_owner,
    encode_owner,
    liveness,
    this_process,
)
from hasten.checkpoint.store.writer_lock import Claim, Lock


class RemoteLocks:
    """The locks under one URL."""

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
        """Add a lock of this process."""
        fs, path, beats = self._fs, self._path(name, token), iter(range(1, 2**62))
        owner = self.here
        fs.pipe_file(path, encode_owner(owner))

        def there() -> bool:
            fs.invalidate_cache()
            return bool(fs.exists(path))

        def beat() -> bool:
            if not there():  # taken for dead: to write it again would bring two owners about
                return False
            fs.pipe_file(path, encode_owner(msgspec.structs.replace(owner, beat=next(beats), beat_s=time.time())))
            return True

        def let_go() -> None:
            if there():
                fs.rm_file(path)

        return Claim(token, there, let_go, beat)

    def entries(self) -> list[Hidden]:
        """All locks under the URL, in one listing."""
        self._fs.invalidate_cache()
        try:
            names = [str(entry["name"]).rpartition("/")[2] for entry in self._fs.ls(self._root, detail=True)]
        except FileNotFoundError:
            return []
        return [entry for entry in map(parse_hidden, names) if entry is not None and entry.what == "lock"]

    def found(self, name: str) -> list[Lock]:
        """All locks of a checkpoint."""
        tag = tag_of(name)
        locks = (self.lock_at(name, entry.token) for entry in self.entries() if entry.tag == tag)
        return [lock for lock in locks if lock is not None]

    def lock_at(self, name: str, token: str) -> Lock | None:
        """The lock of one save; None when it is gone."""
        try:
            owner = decode_owner(self._fs.cat_file(self._path(name, token)))
        except FileNotFoundError:
            return None
        return Lock(token, owner, (owner.beat_s, owner.beat))

    def judge(self, name: str, lock: Lock) -> Liveness:
        """Whether the owner runs, if it is a process of this machine."""
        return liveness(lock.owner, self.here)

    def remove(self, name: str, token: str) -> None:
        """Take a dead owner's lock away."""
        try:
            self._fs.rm_file(self._path(name, token))
        except FileNotFoundError:  # somebody else was faster
            return
