"""Who writes a checkpoint: the identity of a process, and whether the process behind an identity still runs."""

from __future__ import annotations

import os
import platform
import time
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import msgspec

from hasten.errors import CheckpointBusyError

MAX_OWNER_BYTES = 64 * 1024


class Owner(msgspec.Struct, frozen=True, kw_only=True):
    """The content of a lock file: the process that wrote it.

    Process ids repeat, also at the same time in two containers of one machine, so that a process is told by its start
    time, the machine's boot and its process namespace as well.
    """

    host: str = ""
    pid: int = 0
    started: int = 0
    """Clock ticks between the machine's boot and the start of the process; 0 where the system does not say."""
    boot: str = ""
    namespace: str = ""
    since_s: float = 0.0
    locked: bool = False
    """Whether the process holds an flock on the lock file."""
    beat: int = 0
    beat_s: float = 0.0

    @property
    def since(self) -> str:
        """When the save began, as text."""
        return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(self.since_s))

    def same_machine(self, other: Owner) -> bool:
        """Whether both run under one kernel, in whatever containers."""
        return self.boot == other.boot and (bool(self.boot) or self.host == other.host)

    def same_processes(self, other: Owner) -> bool:
        """Whether a process id means the same to both."""
        return self.same_machine(other) and self.namespace == other.namespace


class Liveness(StrEnum):
    """What is known of an owner."""

    RUNNING = "running"
    DEAD = "dead"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Patience:
    """How often an owner renews its lock, and after how long without renewal it counts as dead.

    Only owners on other machines, or in other containers on file systems without flock, are judged by this.
    """

    beat_s: float = 5.0
    stale_s: float = 60.0


def this_process() -> Owner:
    """The identity of the calling process, now."""
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
    """Whether the process runs, as far as its process id tells."""
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
    """The owner as the content of a lock file."""
    return msgspec.json.encode(owner)


def decode_owner(raw: bytes) -> Owner:
    """The owner a lock file names; an unknown one when the file is not (yet) what it should be."""
    try:
        return msgspec.json.decode(raw[:MAX_OWNER_BYTES], type=Owner)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return Owner()


def busy(place: str, owner: Owner, here: Owner) -> CheckpointBusyError:
    """The error for a second writer, naming the first."""
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
    """The error of a writer whose lock was taken over."""
    return CheckpointBusyError(
        f"the lock of this save of {place} is gone: this process gave no sign of life for so long that another one took "
        "it for dead (a suspended machine, a stalled disk), or somebody removed it. The checkpoint was not "
        "committed. Save again."
    )


def _started(pid: int) -> tuple[str, int]:
    """State and start time of a process; unknown where there is no /proc."""
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
