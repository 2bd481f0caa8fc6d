"""Observation of the training thread from another thread: its stack, its counters, its CPU time."""

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

from hasten.comm.collective_log import CollectiveRecord, count_collectives
from hasten.errors import StallError
from hasten.extensions.watch import stacks
from hasten.extensions.watch.state import CodeLine, Note, State, Status, Thread
from hasten.runtime import env
from hasten.runtime import launcher_files as last_words

_STATUS = 0
_FAULTS = 9
_STARTED = 19
"""Positions in /proc/PID/stat, counted from the state field."""
_SWAPPING_FAULTS_PER_S: Final = 20
"""Major page faults per second above which a process counts as swapping; a sleeping process has none."""

_LEAST_MEASURED_S: Final = 0.1
"""Minimum seconds between two measurements of this process."""


def start_ticks(process_id: int | str = "self") -> int:
    """Return the start time of the process in clock ticks since boot; 0 if the kernel does not report it."""
    stat_fields = _process_fields(process_id)
    if stat_fields and len(stat_fields) > _STARTED:
        return int(stat_fields[_STARTED])
    return 0


def pid_namespace() -> str:
    """Return the pid namespace: the same pid in another container is another process. Empty if unknown."""
    try:
        return str(Path("/proc/self/ns/pid").readlink())
    except OSError:  # other systems, or hidden in a container
        return ""


def status_of(process_id: int, started: int) -> Status:
    """Return whether the process runs ("here"), is stopped or gone; "here" if the kernel does not report it."""
    if not Path("/proc/self/stat").exists():
        return "here"
    stat_fields = _process_fields(process_id)
    if stat_fields is None:
        return "here"
    if (
        not stat_fields
        or stat_fields[_STATUS] in "ZX"
        or (started and int(stat_fields[_STARTED]) != started)
    ):
        return "gone"
    return "stopped" if stat_fields[_STATUS] in "Tt" else "here"


def io_count() -> int:
    """Return the bytes that this process has read and written in files, pipes and sockets; 0 if unknown."""
    try:
        lines = Path("/proc/self/io").read_text().splitlines()
    except OSError:  # other systems, or hidden in a container: saves then count as idle
        return 0
    return sum(
        int(line_number.partition(":")[2])
        for line_number in lines
        if line_number.startswith(("rchar", "wchar"))
    )


def major_faults() -> int:
    """Return the number of major page faults of this process so far; 0 if unknown."""
    stat_fields = _process_fields("self")
    return int(stat_fields[_FAULTS]) if stat_fields else 0


def thread_state(thread_number: int, faults_per_s: float) -> Thread:
    """Return the kernel state of one of this process's threads; "asleep" if unknown."""
    stat_fields = _process_fields(f"self/task/{thread_number}")
    if not stat_fields:
        return "asleep"
    if stat_fields[_STATUS] == "D" or faults_per_s > _SWAPPING_FAULTS_PER_S:
        return "disk"
    return "runs" if stat_fields[_STATUS] == "R" else "asleep"


def lost_neighbours(rank_notes: Iterable[Note]) -> dict[int, Status]:
    """Return the ranks of this machine that are stopped or gone."""
    statuses = {}
    for rank_note in rank_notes:
        statuses[rank_note.rank] = status_of(rank_note.pid, rank_note.started)
    return {rank: status for rank, status in statuses.items() if status != "here"}


def _process_fields(process_id: int | str) -> list[str] | None:
    """Return the fields of /proc/PID/stat from the state on; empty if there is no such process, None if unknown."""
    try:
        return Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return []
    except OSError:  # such as too many open files, which is unrelated to the process
        return None


_REAL_IO_BYTES: Final = 1 << 16
"""Reading the kernel's files counts as I/O, too; less than this is no progress of a checkpoint."""


@dataclass(slots=True)
class Observer:
    """Observer of one thread from another thread."""

    rank: int
    collectives: CollectiveRecord
    step: Callable[[], int]
    device_type: str = "cpu"
    thread_id: int = field(default_factory=threading.get_ident)
    native_id: int = field(default_factory=threading.get_native_id)
    _last_cpu: tuple[float, float] = (0.0, 0.0)
    _last_io: tuple[float, int] = (0.0, 0)
    _num_faults: int | None = None
    """Page faults at the last observation; None before the first."""
    _cpu_share: float | None = None
    """Share of a processor core used between the last two measurements; None before the first."""
    _faults_per_s: float = 0.0

    def make_note(self, ended: str = "", failed: bool = False) -> Note:
        """Return the note of this process: its host and pid, and its end."""
        final_counts = None  # a destroyed group has no counters
        if ended and count_collectives(self.device_type):
            final_counts = self.read_counts()
        return Note(
            self.rank,
            socket.gethostname(),
            os.getpid(),
            start_ticks(),
            ended,
            failed,
            pid_namespace(),
            final_counts,
        )

    def read_counts(self) -> dict[str, int]:
        """Return the number of collectives started by every group of this process, including torch's."""
        barriers = {}
        for name, turn in self.collectives.turns.copy().items():
            barriers[f"barrier/{name}"] = turn
        return barriers | count_collectives(self.device_type)

    def start_looking(self) -> None:
        """Start measuring CPU time and file I/O."""
        now_s = time.monotonic()
        self._last_cpu = (now_s, time.process_time())
        self._last_io = (now_s, io_count())
        self._num_faults = self._cpu_share = None

    def observe_thread(
        self,
        quiet_s: float,
        collective_counts: Mapping[str, int],
        peers: Mapping[int, Status] | None = None,
    ) -> State:
        """Return the current state of the training thread; `peers` are other ranks that are stopped or gone."""
        stack_calls = stacks.calls_of(self.thread_id)
        activity = stacks.place_of(stack_calls)
        now_s = time.monotonic()
        used_s = time.process_time()
        io_bytes = io_count()
        passed_s = now_s - self._last_cpu[0]
        if (
            passed_s >= _LEAST_MEASURED_S or self._cpu_share is None
        ):  # over a shorter time the watchdog measures its own work
            num_faults = major_faults()
            self._cpu_share = (used_s - self._last_cpu[1]) / max(passed_s, 1e-3)
            self._faults_per_s = (num_faults - (self._num_faults or num_faults)) / max(
                passed_s, 1e-3
            )
            self._last_cpu = (now_s, used_s)
            self._num_faults = num_faults
        cpu_share = self._cpu_share
        kernel_state = thread_state(self.native_id, self._faults_per_s)
        if io_bytes - self._last_io[1] > _REAL_IO_BYTES:
            self._last_io = (now_s, io_bytes)
        last_collective = self.collectives.last
        last_line = None
        last_ago_s = 0.0
        if last_collective is not None:
            last_ago_s = now_s - last_collective.at_s
            if activity.kind != "collective":
                last_line = _code_line(
                    last_collective.file, last_collective.line, last_collective.op
                )
        return State(
            rank=self.rank,
            host=socket.gethostname(),
            pid=os.getpid(),
            quiet_s=quiet_s,
            kind=activity.kind,
            spot=CodeLine(
                activity.site,
                activity.call,
                stacks.source_line(activity.file, activity.line),
            ),
            function=activity.function,
            step=self.step(),
            cpu_share=cpu_share,
            counts=dict(collective_counts),
            barrier=activity.barrier,
            in_dataset=activity.in_dataset,
            block=self.collectives.block,
            io_quiet_s=now_s - self._last_io[0],
            last=last_line,
            last_ago_s=last_ago_s,
            stack=tuple(stacks.text_of(stack_calls)),
            peers=dict(peers or {}),
            thread=kernel_state,
        )


def describe_error(error: BaseException) -> str:
    """Return the exception in one line, with the last line of the user's code in its traceback."""
    traceback = error.__traceback__
    raise_place = ""
    while traceback is not None:
        file_name = traceback.tb_frame.f_code.co_filename
        if not stacks.is_library(file_name):
            raise_place = (
                f" (raised at {stacks.shorten_path(file_name)}:{traceback.tb_lineno})"
            )
        traceback = traceback.tb_next
    return f"{type(error).__name__}: {error}{raise_place}"


def _code_line(file_name: str, line_number: int, op: str) -> CodeLine:
    return CodeLine(
        f"{stacks.shorten_path(file_name)}:{line_number}",
        op,
        stacks.source_line(file_name, line_number),
    )


STALLED: Final = 86
"""Exit code of a job that was ended because its ranks waited for each other."""
_FLUSH_S: Final = 1.0


def end_process(summary: str, other_notes: Iterable[Note] = ()) -> None:
    """End this process with the reason, after killing those of `others` that are stopped.

    The training thread may be blocked in native code, so no stack is unwound.
    """
    if socket_path := env.snapshot().get(last_words.ERROR_FILE):
        # the disk may have caused the stall; the exit code is still set
        with suppress(OSError):
            last_words.write_error(
                Path(socket_path), f"{StallError.__name__}: {summary}", ""
            )
    # the blocked thread may hold a stream's lock
    flushing = threading.Thread(target=_flush_streams, daemon=True)
    flushing.start()
    flushing.join(_FLUSH_S)
    _kill_stopped(other_notes)
    os._exit(STALLED)


def _kill_stopped(rank_notes: Iterable[Note]) -> None:
    """Kill those of these processes that are stopped: they react to no other signal and would outlive the job."""
    for rank_note in rank_notes:
        if status_of(rank_note.pid, rank_note.started) == "stopped":
            # it ended meanwhile, or belongs to another user
            with suppress(ProcessLookupError, PermissionError):
                os.kill(rank_note.pid, signal.SIGKILL)


def _flush_streams() -> None:
    for stream in (sys.stdout, sys.stderr):
        # closed or missing: nothing to flush
        with suppress(OSError, ValueError, AttributeError):
            stream.flush()
