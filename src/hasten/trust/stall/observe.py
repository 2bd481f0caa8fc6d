"""What a process can see of its own training thread, without disturbing it: its place, its counters, its CPU time."""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

from hasten.comm.collective_counts import begun_collectives
from hasten.comm.collective_log import Trail
from hasten.trust.divergence.state import Note, Spot, State, Status
from hasten.trust.stall import processes, stacks

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
        """Where this process runs, and how it ended."""
        return Note(
            self.rank,
            socket.gethostname(),
            os.getpid(),
            processes.start_ticks(),
            ended,
            failed,
            processes.namespace(),
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
        """How many collectives every group of this process has begun, torch's own included."""
        barriers = {f"barrier/{name}": turn for name, turn in self.trail.turns.copy().items()}
        return barriers | begun_collectives(self.device_type)

    def start_looking(self) -> None:
        """Begin to measure CPU time and file traffic."""
        now = time.monotonic()
        self._cpu = (now, time.process_time())
        self._io = (now, processes.io_count())
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
        now, used, moved = time.monotonic(), time.process_time(), processes.io_count()
        passed = max(now - self._cpu[0], 1e-3)
        share = (used - self._cpu[1]) / passed
        faults = processes.major_faults()
        thread = processes.thread_state(self.native_id, (faults - (self._faults or faults)) / passed)
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
    """The exception in a line, with the last line of the user's code that it passed through."""
    trace, where = error.__traceback__, ""
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        if not stacks.is_library(file):
            where = f" (raised at {stacks.short(file)}:{trace.tb_lineno})"
        trace = trace.tb_next
    return f"{type(error).__name__}: {error}{where}"


def _others_alive() -> str:
    """The threads for which the interpreter waits at its end, by name."""
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
