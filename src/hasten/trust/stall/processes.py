"""What the kernel tells about processes of this machine: whether they run, are stopped or have ended, what they use, and what they read."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from hasten.trust.divergence.state import IDLE_SHARE, Note, Status, Thread

_STATUS, _FAULTS, _USER, _SYSTEM, _STARTED = 0, 9, 11, 12, 19
"""Positions in /proc/PID/stat, counted from the state on."""
_TICKS_PER_S: Final = 100.0  # the kernel reports in hundredths of a second on every platform that torch runs on
_SWAPPING: Final = 20
"""Page faults per second that had to read from a disk; a process that sleeps has none."""

_SPAN_S: Final = 0.5
"""Seconds between two measurements of a process."""


def start_ticks(pid: int | str = "self") -> int:
    """When the process began, in clock ticks since the machine started; 0 where the kernel does not tell."""
    fields = _fields(pid)
    return int(fields[_STARTED]) if fields and len(fields) > _STARTED else 0


def namespace() -> str:
    """The namespace of this process's pid: in another container the same number is another process. Empty if unknown."""
    try:
        return str(Path("/proc/self/ns/pid").readlink())
    except OSError:  # other systems, or a container that hides it
        return ""


def status_of(pid: int, started: int) -> Status:
    """Whether the process runs ("here"), is stopped or gone; "here" wherever the kernel does not tell."""
    if not Path("/proc/self/stat").exists():
        return "here"
    fields = _fields(pid)
    if fields is None:
        return "here"
    if not fields or fields[_STATUS] in "ZX" or (started and int(fields[_STARTED]) != started):
        return "gone"
    return "stopped" if fields[_STATUS] in "Tt" else "here"


def io_count() -> int:
    """Bytes that this process has read and written through files, pipes and sockets; 0 where the kernel does not tell."""
    try:
        lines = Path("/proc/self/io").read_text().splitlines()
    except OSError:  # other systems, or a container that hides it: saves then count as quiet
        return 0
    return sum(int(line.partition(":")[2]) for line in lines if line.startswith(("rchar", "wchar")))


def major_faults() -> int:
    """Page faults of this process that had to read from a disk so far; 0 where the kernel does not tell."""
    fields = _fields("self")
    return int(fields[_FAULTS]) if fields else 0


def thread_state(thread: int, faults_per_s: float) -> Thread:
    """The state of one of this process's threads in the kernel; "asleep" where the kernel does not tell."""
    fields = _fields(f"self/task/{thread}")
    if not fields:
        return "asleep"
    if fields[_STATUS] == "D" or faults_per_s > _SWAPPING:
        return "disk"
    return "runs" if fields[_STATUS] == "R" else "asleep"


@dataclass(slots=True)
class Neighbours:
    """The other processes of the job on this machine, seen again and again by one of them."""

    _used: dict[int, tuple[float, float, int, str]] = field(default_factory=dict)
    """By rank: when it was measured last, its processor time and its page faults then, and what they said."""

    def look(self, notes: Mapping[int, Note]) -> tuple[dict[int, Status], dict[int, str]]:
        """The ranks that are stopped or gone; and of the others what they have used since the last look, in words."""
        lost: dict[int, Status] = {}
        activities: dict[int, str] = {}
        for rank, note in notes.items():
            status = status_of(note.pid, note.started)
            if status != "here":
                lost[rank] = status
            elif words := self._activity(rank, note.pid):
                activities[rank] = words
        return lost, activities

    def _activity(self, rank: int, pid: int) -> str:
        fields = _fields(pid)
        if not fields:
            return ""
        now = time.monotonic()
        used, faults = (int(fields[_USER]) + int(fields[_SYSTEM])) / _TICKS_PER_S, int(fields[_FAULTS])
        before, used_before, faults_before, words = self._used.setdefault(rank, (now, used, faults, ""))
        if now - before < _SPAN_S:
            return words
        share = (used - used_before) / (now - before)
        if fields[_STATUS] == "D" or (faults - faults_before) / (now - before) > _SWAPPING:
            words = "it waits for the disk or for memory that was swapped out"
        elif share >= IDLE_SHARE:
            words = f"it uses {share:.0%} of a processor core"
        else:
            words = "it wants to run while others use the processor" if fields[_STATUS] == "R" else "it sleeps"
        self._used[rank] = (now, used, faults, words)
        return words


def _fields(pid: int | str) -> list[str] | None:
    """The fields of /proc/PID/stat from the state on; empty if there is no such process, None if that cannot be told."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return []
    except OSError:  # such as too many open files, which says nothing about the process
        return None
