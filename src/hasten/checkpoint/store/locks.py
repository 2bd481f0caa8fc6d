"""Lock files: one writer at a time for each checkpoint, identified in the file, which it renews while it is alive.

Every writer adds a separate lock file and then lists all of them: if it finds another live lock, it removes its
lock again. Two writers at the same moment may both back off and retry, but never do both continue. Locks are neither
transferred nor overwritten, so the file system only has to make a new file visible immediately.
"""

from __future__ import annotations

import fcntl
import gc
import hashlib
import logging
import os
import platform
import re
import secrets
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import NamedTuple, Protocol

import msgspec

from hasten.checkpoint.format.manifest import open_outside
from hasten.checkpoint.store.disk import Disk
from hasten.errors import CheckpointBusyError

log = logging.getLogger(__name__)
MAX_OWNER_BYTES = 64 * 1024
_HIDDEN = re.compile(r"\.hasten-(draft|trash|lock|claim)\.(.+)\.([0-9a-f]+)")
_LONGEST = 150
_TRIES = 6
_OLD = 5
"""Multiple of the stale time after which a lock is dead immediately, without waiting for a heartbeat."""


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
        paths = sorted(folder.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return
    for path in paths:
        if path.name.startswith(".hasten-") and (found := parse_hidden(path.name)) is not None:
            yield path, found


class Owner(msgspec.Struct, frozen=True, kw_only=True):
    """The content of a lock file: the process that wrote it.

    Process ids repeat, even at the same time in two containers of one machine, so a process is also identified by its
    start time, the machine's boot id and its process namespace.
    """

    host: str = ""
    pid: int = 0
    started: int = 0
    """Clock ticks between the machine's boot and the start of the process; 0 where the system does not report it."""
    boot: str = ""
    namespace: str = ""
    since_s: float = 0.0
    locked: bool = False
    """True if the process holds an flock on the lock file."""
    beat: int = 0
    beat_s: float = 0.0

    @property
    def since(self) -> str:
        """Start time of the save, as text."""
        return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(self.since_s))

    def same_machine(self, other: Owner) -> bool:
        """Return True if both run under one kernel, in any container."""
        return self.boot == other.boot and (bool(self.boot) or self.host == other.host)

    def same_processes(self, other: Owner) -> bool:
        """Return True if a process id means the same process to both."""
        return self.same_machine(other) and self.namespace == other.namespace


class Liveness(StrEnum):
    """Liveness of a lock's owner, as far as it is known."""

    RUNNING = "running"
    DEAD = "dead"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class LockTimeouts:
    """Renewal interval of a lock, and the time without renewal after which its owner counts as dead.

    It applies only to owners on other machines, or in other containers on file systems without flock.
    """

    beat_s: float = 5.0
    stale_s: float = 60.0


def this_process() -> Owner:
    """Return the identity of the calling process, with the current time."""
    try:
        namespace = str(Path("/proc/self/ns/pid").readlink())
    except OSError:  # no /proc: ids are those of the machine
        namespace = ""
    return Owner(
        host=platform.node(),
        pid=os.getpid(),
        started=_state_and_start(os.getpid())[1],
        boot=_read("/proc/sys/kernel/random/boot_id"),
        namespace=namespace,
        since_s=time.time(),
        beat_s=time.time(),
    )


def liveness(owner: Owner, here: Owner) -> Liveness:
    """Return the liveness of a process, judged by its process id."""
    if not owner.pid or not owner.same_processes(here):
        return Liveness.UNKNOWN
    try:
        os.kill(owner.pid, 0)
    except ProcessLookupError:
        return Liveness.DEAD
    except OSError:  # it runs, as another user
        return Liveness.RUNNING
    state, started = _state_and_start(owner.pid)
    if state in ("Z", "X") or (started and owner.started and started != owner.started):
        return Liveness.DEAD
    return Liveness.RUNNING


def encode_owner(owner: Owner) -> bytes:
    """Return the owner as the content of a lock file."""
    return msgspec.json.encode(owner)


def decode_owner(raw: bytes) -> Owner:
    """Return the owner in a lock file; an unknown owner when the file is invalid or not yet complete."""
    try:
        return msgspec.json.decode(raw[:MAX_OWNER_BYTES], type=Owner)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return Owner()


def busy(place: str, owner: Owner, here: Owner) -> CheckpointBusyError:
    """Return the error for a second writer, naming the first."""
    who = f"process {owner.pid} on {owner.host}" if owner.pid else "an unknown process"
    if owner.pid and (owner.pid, owner.started) == (here.pid, here.started) and owner.same_processes(here):
        who = f"this process itself (process {owner.pid} on {owner.host})"
    when = f" since {owner.since}" if owner.since_s else ""
    return CheckpointBusyError(
        f"{place} is being written by {who}{when}. Two saves into one folder at a time would mix their files, so this one "
        "did not begin and nothing was changed. Wait for the other save, or save into another folder.",
        owner.host,
        owner.pid,
        owner.since_s,
    )


def lost(place: str) -> CheckpointBusyError:
    """Return the error for a writer whose lock was removed."""
    return CheckpointBusyError(
        f"the lock of this save of {place} is gone: this process did not renew it for so long that another process "
        "considered it dead (a suspended machine, a stalled disk), or the file was deleted. The checkpoint was not "
        "committed. Save again."
    )


def _state_and_start(pid: int) -> tuple[str, int]:
    """Return the state and start time of a process; unknown where there is no /proc."""
    fields = _read(f"/proc/{pid}/stat").rpartition(")")[2].split()
    return (fields[0], int(fields[19])) if len(fields) > 19 else ("", 0)


def _read(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:  # not on this system
        return ""


@dataclass(frozen=True, slots=True)
class FoundLock:
    """A lock file as found: its token, its owner, and a signature that changes with every heartbeat."""

    token: str
    owner: Owner
    signature: tuple[float, int]


class Locks(Protocol):
    """The locks of one folder or URL."""

    @property
    def here(self) -> Owner:
        """The identity of this process."""
        ...

    @property
    def timeouts(self) -> LockTimeouts: ...

    def create(self, name: str, token: str) -> WriterLock:
        """Create a lock of this process."""
        ...

    def found(self, name: str, own: str = "") -> list[FoundLock]:
        """Return all locks of a checkpoint, except the one with the token `own`."""
        ...

    def liveness(self, name: str, lock: FoundLock) -> Liveness:
        """Return the liveness of the owner, without waiting for a heartbeat."""
        ...

    def remove(self, name: str, token: str) -> None:
        """Delete the lock of a dead owner."""
        ...


class WriterLock:
    """A lock of this process on one checkpoint, until it is released or garbage-collected."""

    def __init__(
        self, token: str, exists: Callable[[], bool], remove: Callable[[], None], renew: Callable[[], bool]
    ) -> None:
        self.token = token
        self._exists = exists
        self._remove = remove
        self._renew = renew
        self._ended = threading.Event()
        self._threads: list[threading.Thread] = []
        self._end = weakref.finalize(self, _end, self._ended, self._threads, remove, os.getpid())

    def start_heartbeat(self, every_s: float) -> None:
        """Start a thread that renews the lock periodically."""
        thread = threading.Thread(
            target=_renew_until, args=(self._ended, self._renew, every_s), name="hasten-lock", daemon=True
        )
        thread.start()
        self._threads.append(thread)

    def held(self) -> bool:
        """Return True if the lock still exists."""
        return self._end.alive and self._exists()

    def check(self, place: str) -> None:
        """Raise CheckpointBusyError unless the lock still exists."""
        if not self.held():
            raise lost(place)

    def release(self) -> None:
        """Delete the lock; safe to call repeatedly."""
        try:
            self._end()
        except BaseException:  # the run must not block its next save
            self._remove()
            raise


def _renew_until(ended: threading.Event, renew: Callable[[], bool], every_s: float) -> None:
    while not ended.wait(every_s):
        try:
            if not renew():
                return
        except OSError as error:  # the next renewal may succeed; if none does, the commit finds the lock removed
            log.debug("a lock could not be renewed: %s", error)


def _end(ended: threading.Event, threads: list[threading.Thread], remove: Callable[[], None], pid: int) -> None:
    if os.getpid() != pid:  # a forked copy: the lock belongs to the parent
        return
    try:
        ended.set()
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join()
    finally:
        try:
            remove()
        except OSError:
            _remove_again(remove)


def _remove_again(remove: Callable[[], None]) -> None:
    """Retry the removal: otherwise the next save would wait for the lock."""
    try:
        remove()
    except OSError as error:  # the lock of a process that has ended or has released it is ignored
        log.warning("a lock could not be removed: %s", error)


def acquire(locks: Locks, name: str, place: str) -> WriterLock:
    """Lock a checkpoint for this process. `place` names it in messages.

    Raises: CheckpointBusyError when another live process holds it.
    """
    rival, collected = None, False
    for attempt in range(_TRIES):
        if attempt:
            time.sleep((5 + secrets.randbelow(15)) / 1000 * attempt)  # not from the generators that training uses
        rival = _find_live(locks, name, place)
        if rival is not None:
            if rival.owner.pid == locks.here.pid and not collected:  # a failed save's lock may await collection
                gc.collect()
                collected = True
            continue
        lock = locks.create(name, secrets.token_hex(6))
        try:
            for other in locks.found(name, lock.token):
                if not is_dead(locks, name, other):
                    rival = other
                    break
            else:
                lock.start_heartbeat(locks.timeouts.beat_s)
                return lock
        except BaseException:
            lock.release()
            raise
        lock.release()
    assert rival is not None, "a lock without a rival was returned"
    raise busy(place, rival.owner, locks.here)


def is_dead(locks: Locks, name: str, lock: FoundLock) -> bool:
    """Return True if the owner is known to be dead, without waiting."""
    state = locks.liveness(name, lock)
    age_s = time.time() - max(lock.owner.beat_s, lock.signature[0])
    return state is Liveness.DEAD or (state is Liveness.UNKNOWN and age_s > _OLD * locks.timeouts.stale_s)


def _find_live(locks: Locks, name: str, place: str) -> FoundLock | None:
    """Return a lock whose owner is alive, after waiting for a heartbeat of owners with unknown state."""
    watched: dict[str, FoundLock] = {}
    stale_s = locks.timeouts.stale_s
    until = time.monotonic() + stale_s
    while True:
        waiting = []
        for lock in locks.found(name):
            if is_dead(locks, name, lock):
                continue
            first = watched.setdefault(lock.token, lock)
            if locks.liveness(name, lock) is Liveness.RUNNING or lock.signature != first.signature:
                return lock
            waiting.append(lock)
        if not waiting:
            return None
        if time.monotonic() >= until:
            for lock in waiting:
                log.warning(
                    "process %d on %s, which has been writing %s since %s, did not renew its lock for %g s and counts as dead",
                    *(lock.owner.pid, lock.owner.host, place, lock.owner.since, stale_s),
                )
                locks.remove(name, lock.token)
            return None
        if len(watched) == len(waiting) and until - time.monotonic() > stale_s * 0.99:
            owner = waiting[0].owner
            log.warning(
                "%s has a lock of process %d on %s (since %s); waiting up to %g s for its next heartbeat",
                *(place, owner.pid, owner.host, owner.since, stale_s),
            )
        time.sleep(min(1.0, stale_s / 10))


class LocalLocks:
    """Lock files of one folder."""

    def __init__(
        self, folder: Path, disk: Disk, timeouts: LockTimeouts | None = None, here: Owner | None = None
    ) -> None:
        self._folder = folder
        self._disk = disk
        self.timeouts = timeouts or LockTimeouts()
        self.here = here or this_process()

    def create(self, name: str, token: str) -> WriterLock:
        """Create a lock of this process; the file appears under its name once it is written and locked."""
        path = self._folder / hidden("lock", name, token)
        flocked = encode_owner(msgspec.structs.replace(self.here, locked=True))
        fd = self._disk.put_lock(self._folder / hidden("claim", name, token), path, flocked, encode_owner(self.here))
        held = [fd]  # emptied on release: the number of a closed descriptor may be in use for another file

        def renew() -> bool:
            if exists := path.exists():
                os.utime(path)
            return exists

        def remove() -> None:
            try:
                self._disk.remove_file(path)
            finally:
                if held:
                    unlock(held.pop())

        try:
            return WriterLock(token, path.exists, remove, renew)
        except BaseException:
            remove()
            raise

    def found(self, name: str, own: str = "") -> list[FoundLock]:
        """Return all locks of a checkpoint, except the one with the token `own`."""
        tag, locks = tag_of(name), []
        for path, entry in hidden_entries(self._folder):
            if entry.what == "lock" and entry.tag == tag and entry.token != own:
                lock = self.lock_at(path, entry.token)
                locks += [] if lock is None else [lock]
        return locks

    def lock_at(self, path: Path, token: str) -> FoundLock | None:
        """Return the lock in a file; None when the file does not exist."""
        try:
            with open_outside(path) as file:
                return FoundLock(token, decode_owner(file.read(MAX_OWNER_BYTES)), (os.fstat(file.fileno()).st_mtime, 0))
        except FileNotFoundError:
            return None
        except OSError:  # exists but cannot be read: it belongs to another user
            return FoundLock(token, Owner(), (path.stat().st_mtime, 0))

    def liveness(self, name: str, lock: FoundLock) -> Liveness:
        """Return the liveness of the owner, known from its process id and, where supported, from its flock."""
        state = liveness(lock.owner, self.here)
        if state is Liveness.DEAD or not lock.owner.locked:
            return state
        free = lock_is_free(self._folder / hidden("lock", name, lock.token))
        if free is False:
            return Liveness.RUNNING
        # some network file systems apply flocks within one machine only
        if free and lock.owner.same_machine(self.here):
            return Liveness.DEAD  # also a lock that a running process released and could not delete
        return state

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
