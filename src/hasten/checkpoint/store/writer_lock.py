"""Claims: one writer at a time for each checkpoint, with a lock file that identifies it and shows that it is alive.

Every writer adds a separate lock file and then lists all of them: if it finds another live lock, it removes its
lock again. Two writers at the same moment may both back off and retry, but never do both continue. Locks are neither
transferred nor overwritten, so the file system only has to make a new file visible immediately.
"""

from __future__ import annotations

import gc
import logging
import os
import platform
import secrets
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Protocol

import msgspec

from hasten.errors import CheckpointBusyError

MAX_OWNER_BYTES = 64 * 1024


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
class Patience:
    """Renewal interval of a lock, and the time without renewal after which its owner counts as dead.

    It applies only to owners on other machines, or in other containers on file systems without flock.
    """

    beat_s: float = 5.0
    stale_s: float = 60.0


def this_process() -> Owner:
    """Return the identity of the calling process, with the current time."""
    return Owner(
        host=platform.node(),
        pid=os.getpid(),
        started=_started(os.getpid())[1],
        boot=_read(Path("/proc/sys/kernel/random/boot_id")),
        namespace=_namespace(),
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
    state, started = _started(owner.pid)
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
    who = f"process {owner.pid} on {owner.host}" if owner.pid else "a process that left no name"
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
        f"the lock of this save of {place} is gone: this process gave no sign of life for so long that another one took "
        "it for dead (a suspended machine, a stalled disk), or somebody removed it. The checkpoint was not "
        "committed. Save again."
    )


def _started(pid: int) -> tuple[str, int]:
    """Return the state and start time of a process; unknown where there is no /proc."""
    fields = _read(Path(f"/proc/{pid}/stat")).rpartition(")")[2].split()
    return (fields[0], int(fields[19])) if len(fields) > 19 else ("", 0)


def _namespace() -> str:
    try:
        return str(Path("/proc/self/ns/pid").readlink())
    except OSError:  # no /proc: ids are those of the machine
        return ""


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:  # not on this system
        return ""


log = logging.getLogger(__name__)
_TRIES = 6
_OLD = 5
"""Multiple of the patience after which a lock is dead immediately, without waiting for a heartbeat."""


@dataclass(frozen=True, slots=True)
class Lock:
    """A lock as found: its token, its owner, and a signature that changes with every heartbeat."""

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
    def patience(self) -> Patience: ...

    def put(self, name: str, token: str) -> Claim:
        """Create a lock of this process."""
        ...

    def found(self, name: str) -> list[Lock]:
        """Return all locks of a checkpoint."""
        ...

    def judge(self, name: str, lock: Lock) -> Liveness:
        """Return the liveness of the owner, without waiting for a heartbeat."""
        ...

    def remove(self, name: str, token: str) -> None:
        """Delete the lock of a dead owner."""
        ...


class Claim:
    """The right of this process to write one checkpoint, until it is released or garbage-collected."""

    def __init__(
        self, token: str, there: Callable[[], bool], let_go: Callable[[], None], beat: Callable[[], bool]
    ) -> None:
        self.token = token
        self._there = there
        self._signs = _Signs(beat)
        self._let_go = let_go
        self._end = weakref.finalize(self, _end, self._signs, let_go, os.getpid())

    def keep(self, every_s: float) -> None:
        """Start to renew the lock periodically."""
        self._signs.start(every_s)

    def held(self) -> bool:
        """Return True if the lock still exists."""
        return self._end.alive and self._there()

    def check(self, place: str) -> None:
        """Raise CheckpointBusyError unless the lock still exists."""
        if not self.held():
            raise lost(place)

    def release(self) -> None:
        """Delete the lock; safe to call repeatedly."""
        try:
            self._end()
        except BaseException:  # the run must not block its next save
            self._let_go()
            raise


class _Signs:
    """A thread that renews a lock."""

    def __init__(self, beat: Callable[[], bool]) -> None:
        self._beat = beat
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self, every_s: float) -> None:
        self._thread = threading.Thread(target=self._run, args=(every_s,), name="hasten-lock", daemon=True)
        self._thread.start()

    def _run(self, every_s: float) -> None:
        while not self._ended.wait(every_s):
            try:
                if not self._beat():
                    return
            except OSError as error:  # the next renewal may succeed; if none does, the commit finds the lock removed
                log.debug("a lock could not be renewed: %s", error)

    def stop(self) -> None:
        self._ended.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()


def _end(signs: _Signs, let_go: Callable[[], None], pid: int) -> None:
    if os.getpid() != pid:  # a forked copy: the claim belongs to the parent
        return
    try:
        signs.stop()
    finally:
        try:
            let_go()
        except OSError:
            _let_go_again(let_go)


def _let_go_again(let_go: Callable[[], None]) -> None:
    """Retry the release: the first attempt may have failed before it, and the next save would wait for the lock."""
    try:
        let_go()
    except OSError as error:  # the lock of a process that has ended or has released it is ignored
        log.warning("a lock could not be removed: %s", error)


def take(locks: Locks, name: str, place: str) -> Claim:
    """Claim a checkpoint for this process. `place` names it in messages.

    Raises: CheckpointBusyError when another live process holds it.
    """
    rival, collected = None, False
    for attempt in range(_TRIES):
        if attempt:
            time.sleep((5 + secrets.randbelow(15)) / 1000 * attempt)  # not from the generators that training uses
        rival = _running(locks, name, place)
        if rival is not None:
            if rival.owner.pid == locks.here.pid and not collected:  # a failed save's claim may await collection
                gc.collect()
                collected = True
            continue
        token = secrets.token_hex(6)
        claim = locks.put(name, token)
        try:
            rival = _seen(locks, name, token)
            if rival is None:
                claim.keep(locks.patience.beat_s)
                return claim
        except BaseException:
            claim.release()
            raise
        claim.release()
    assert rival is not None, "a claim without a rival was returned"
    raise busy(place, rival.owner, locks.here)


def dead(locks: Locks, name: str, lock: Lock) -> bool:
    """Return True if the owner is known to be dead, without waiting."""
    verdict = locks.judge(name, lock)
    age_s = time.time() - max(lock.owner.beat_s, lock.signature[0])
    return verdict is Liveness.DEAD or (verdict is Liveness.UNKNOWN and age_s > _OLD * locks.patience.stale_s)


def _seen(locks: Locks, name: str, token: str) -> Lock | None:
    """Return another lock whose owner may be alive; None if there is none."""
    others = (lock for lock in locks.found(name) if lock.token != token)
    return next((lock for lock in others if not dead(locks, name, lock)), None)


def _running(locks: Locks, name: str, place: str) -> Lock | None:
    """Return a lock whose owner is alive, after waiting for a heartbeat of owners with unknown state."""
    watched: dict[str, Lock] = {}
    until = time.monotonic() + locks.patience.stale_s
    while True:
        waiting = []
        for lock in locks.found(name):
            if dead(locks, name, lock):
                continue
            first = watched.setdefault(lock.token, lock)
            if locks.judge(name, lock) is Liveness.RUNNING or lock.signature != first.signature:
                return lock
            waiting.append(lock)
        if not waiting:
            return None
        if time.monotonic() >= until:
            for lock in waiting:
                _bury(locks, name, lock, place)
            return None
        if len(watched) == len(waiting) and until - time.monotonic() > locks.patience.stale_s * 0.99:
            owner = waiting[0].owner
            log.warning(
                "%s has a lock of process %d on %s (since %s); waiting up to %g s for a sign of life",
                *(place, owner.pid, owner.host, owner.since, locks.patience.stale_s),
            )
        time.sleep(min(1.0, locks.patience.stale_s / 10))


def _bury(locks: Locks, name: str, lock: Lock, place: str) -> None:
    log.warning(
        "process %d on %s, which began to write %s at %s, gave no sign of life for %g s and counts as dead",
        *(lock.owner.pid, lock.owner.host, place, lock.owner.since, locks.patience.stale_s),
    )
    locks.remove(name, lock.token)
