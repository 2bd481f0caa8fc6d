"""What a process can see of its own training thread, without disturbing it: its place, its counters, its CPU time."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from hasten.comm.collective_log import Trail, begun_collectives
from hasten.errors import StallError
from hasten.runtime import env, last_words
from hasten.trust.divergence.state import IDLE_SHARE, Note, Spot, State, Status, Thread
from hasten.trust.stall import stacks

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
    """Return whether the process runs ("here"), is stopped or gone; "here" wherever the kernel does not tell."""
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
    """Return the state of one of this process's threads in the kernel; "asleep" where the kernel does not tell."""
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


_REAL_IO_BYTES: Final = 1 << 16
"""Looking at the kernel's files counts as reading, too; less than this is no work on a checkpoint."""


@dataclass(slots=True)
class Observer:
    """Watches one thread from another."""

    rank: int
    trail: Trail
    step: Callable[[], int]
    device_type: str = "cpu"
    thread_id: int = field(default_factory=threading.get_ident)
    native_id: int = field(default_factory=threading.get_native_id)
    program: str = field(default_factory=lambda: stacks.root_of(stacks.calls_of(threading.get_ident())))
    """The outermost call of the thread while its program runs; exit handlers have another."""
    _cpu: tuple[float, float] = (0.0, 0.0)
    _io: tuple[float, int] = (0.0, 0)
    _faults: int | None = None
    """Page faults at the last look; None at the first one, so that a rank that does not wait counts none."""

    def note(self, ended: str = "", failed: bool = False) -> Note:
        """Return where this process runs, and how it ended."""
        return Note(
            self.rank,
            socket.gethostname(),
            os.getpid(),
            start_ticks(),
            ended,
            failed,
            namespace(),
            self.counts()
            if ended and begun_collectives(self.device_type)
            else None,  # a destroyed group counts nothing
        )

    def failure(self) -> str:
        """The exception that ended the program of a process that threads or exit handlers keep alive; empty if there is none."""
        error, calls = getattr(sys, "last_value", None), stacks.calls_of(self.thread_id)
        if error is None or not (stacks.is_over(calls) or stacks.root_of(calls) != self.program):
            return ""
        return f"{error_words(error)}; its process is alive because of {_others_alive()}"

    def counts(self) -> dict[str, int]:
        """Return how many collectives every group of this process has begun, torch's own included."""
        barriers = {f"barrier/{name}": turn for name, turn in self.trail.turns.copy().items()}
        return barriers | begun_collectives(self.device_type)

    def start_looking(self) -> None:
        """Begin to measure CPU time and file traffic."""
        now = time.monotonic()
        self._cpu = (now, time.process_time())
        self._io = (now, io_count())
        self._faults = None

    def look(
        self,
        quiet_s: float,
        counts: Mapping[str, int],
        peers: Mapping[int, Status] | None = None,
        activities: Mapping[int, str] | None = None,
    ) -> State:
        """What the training thread is doing now; `peers` and `activities` are what the kernel says of other ranks."""
        calls = stacks.calls_of(self.thread_id)
        place = stacks.place_of(calls)
        now, used, moved = time.monotonic(), time.process_time(), io_count()
        passed = max(now - self._cpu[0], 1e-3)
        share = (used - self._cpu[1]) / passed
        faults = major_faults()
        thread = thread_state(self.native_id, (faults - (self._faults or faults)) / passed)
        self._cpu, self._faults = (now, used), faults
        if moved - self._io[1] > _REAL_IO_BYTES:
            self._io = (now, moved)
        last = self.trail.last
        handed = stacks.handed_over(self.thread_id)
        return State(
            rank=self.rank,
            host=socket.gethostname(),
            pid=os.getpid(),
            quiet_s=quiet_s,
            kind=place.kind,
            spot=Spot(place.site, place.call, stacks.source_line(place.file, place.line)),
            function=place.function,
            step=self.step(),
            cpu_share=share,
            counts=dict(counts),
            barrier=place.barrier,
            in_dataset=place.in_dataset,
            block=self.trail.block,
            io_quiet_s=now - self._io[0],
            op=handed.op if handed else "",
            shape=handed.shape if handed else None,
            dtype=handed.dtype if handed else "",
            last=None if last is None or place.kind == "collective" else _spot(last.file, last.line, last.op),
            last_ago_s=0.0 if last is None else now - last.at_s,
            stack=tuple(stacks.text_of(calls)),
            peers=dict(peers or {}),
            activities=dict(activities or {}),
            thread=thread,
        )


def error_words(error: BaseException) -> str:
    """Return the exception in a line, with the last line of the user's code that it passed through."""
    trace, where = error.__traceback__, ""
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        if not stacks.is_library(file):
            where = f" (raised at {stacks.short(file)}:{trace.tb_lineno})"
        trace = trace.tb_next
    return f"{type(error).__name__}: {error}{where}"


def _others_alive() -> str:
    """Return the threads for which the interpreter waits at its end, by name."""
    names = [
        thread.name
        for thread in threading.enumerate()
        if not thread.daemon and thread is not threading.main_thread() and thread.is_alive()
    ]
    return (
        f"the thread{'s' if len(names) > 1 else ''} {', '.join(map(repr, names[:4]))}" if names else "its exit handlers"
    )


def _spot(file: str, line: int, op: str) -> Spot:
    return Spot(f"{stacks.short(file)}:{line}", op, stacks.source_line(file, line))


STALLED: Final = 86
"""The exit code of a job that was ended because its ranks waited for each other."""
_FLUSH_S: Final = 1.0


def end_process(summary: str, others: Iterable[Note] = ()) -> None:
    """End this process with the reason, after those of `others` that are stopped.

    The training thread may be blocked in native code, so nothing is unwound.
    """
    if path := env.snapshot().get(last_words.ERROR_FILE):
        with suppress(OSError):  # the disk may be what stalled; the exit code still tells
            last_words.write(Path(path), f"{StallError.__name__}: {summary}", "")
    flushing = threading.Thread(target=_flush, daemon=True)  # the blocked thread may hold a stream's lock
    flushing.start()
    flushing.join(_FLUSH_S)
    _kill_stopped(others)
    os._exit(STALLED)


def _kill_stopped(notes: Iterable[Note]) -> None:
    """Kill those of these processes that are stopped: they would outlive the job, since they act on no other signal."""
    for note in notes:
        if status_of(note.pid, note.started) == "stopped":
            with suppress(ProcessLookupError, PermissionError):  # it ended meanwhile, or is another user's
                os.kill(note.pid, signal.SIGKILL)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):  # closed or missing: there is nothing to save
            stream.flush()
