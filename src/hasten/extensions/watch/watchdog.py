"""Watchdog thread that detects a wait of the training thread, collects the states of all ranks and reports the cause.

It wakes once a second, compares a few counters and sleeps again. Every few seconds it posts the state of its rank to the job's store. When
ranks have started no collective for some seconds, the lowest of them reads the states of all ranks, and asks the kernel about those of its
machine.
"""

from __future__ import annotations

import atexit
import logging
import os
import socket
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Final, Literal

import msgspec

from hasten.comm.process_group import ProcessGroupComm
from hasten.extensions.watch import observe as ending
from hasten.extensions.watch import observe as processes
from hasten.extensions.watch import wording as words
from hasten.extensions.watch.diagnose import Diagnosis, diagnose
from hasten.extensions.watch.evidence import HEARTBEAT_TICKS, Evidence, pause_s
from hasten.extensions.watch.observe import Observer, describe_error
from hasten.extensions.watch.stall_store import StallStore
from hasten.extensions.watch.state import Note, SeenState, State, Status
from hasten.runtime import env, launcher_files
from hasten.runtime.context import ProcessContext
from hasten.runtime.store import LOST
from hasten.runtime.topology import Topology

log = logging.getLogger(__name__)

LEAST_S: Final = 60.0
MOST_S: Final = 600.0
_QUIET_S: Final = 5.0
_TICK_S: Final = 1.0
_PATIENCE_FACTOR: Final = 10.0
_LONG_FACTOR: Final = 3.0
_LATEST_DELAYED_RANK: Final = 8
_SILENT_PAUSES: Final = 4.0


@dataclass(frozen=True, slots=True)
class WatchSettings:
    """Waiting time before a report, and whether the job then ends."""

    after_s: float | None = None
    """Seconds of waiting before a report; None derives it from the longest wait so far, from 60 to 600."""
    then: Literal["abort", "report"] = "abort"
    timeout_s: float = 1800.0
    """The timeout of the process group."""
    folder: Path = field(default_factory=Path)
    """Folder of the reports."""
    noted: Callable[[float, bool], None] = lambda _seconds, _over: None
    """Called with the seconds of waiting when a stall is reported (False), and when the ranks make progress again (True)."""


class Watchdog:
    """Watchdog of one rank. `start` and `close` are called by the training thread."""

    def __init__(
        self,
        observer: Observer,
        stall_store: StallStore,
        topology: Topology,
        settings: WatchSettings,
    ) -> None:
        self._observer = observer
        self._stall_store = stall_store
        self._ranks = range(topology.world_size)
        first_local_rank = topology.rank - topology.local_rank
        self._local_ranks = range(
            first_local_rank, first_local_rank + topology.local_world_size
        )
        self._settings = settings
        self._is_over = threading.Event()
        self._thread = threading.Thread(
            target=self._run, name="hasten-watchdog", daemon=True
        )
        self._counts: dict[str, int] = {}
        self._quiet_since = 0.0
        self._post_at = 0.0
        self._longest_s = 0.0
        self._tick_s = min(_TICK_S, (settings.after_s or LEAST_S) / 8)
        self._is_reporter = False
        self._heartbeat_number = 0
        self._last_reporter = ("", 0.0)
        self._evidence = Evidence(observer.rank, self._tick_s)
        self._reported_key: tuple[object, ...] = ()

    def start(self) -> None:
        """Post this rank's host and process, and start watching."""
        self._stall_store.register(self._observer.note())
        self._thread.start()

    def close(self, ended: str = "", failed: bool = False) -> None:
        """Stop watching; with `ended`, post the end of this rank."""
        if self._is_over.is_set():
            return
        self._is_over.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(2 * _TICK_S)
        if ended:
            try:
                self._stall_store.post_end(self._observer.note(ended, failed))
            # the store's server has already exited: no rank is left to read it
            except LOST:
                return

    # -- the watchdog thread ----------------------------------------------------------------------------------------
    @property
    def after_s(self) -> float:
        """Seconds of waiting before a report."""
        if self._settings.after_s is not None:
            return self._settings.after_s
        return min(MOST_S, max(LEAST_S, _LONG_FACTOR * self._longest_s))

    @property
    def _look_s(self) -> float:
        """Seconds without a collective after which this rank posts its state."""
        return min(_QUIET_S, self.after_s / 2)

    @property
    def patience_s(self) -> float:
        """Seconds of waiting for a working rank before the job is ended: at least the group's timeout."""
        return max(_PATIENCE_FACTOR * self.after_s, self._settings.timeout_s)

    def _run(self) -> None:
        before = self._quiet_since = time.monotonic()
        while not self._is_over.wait(self._tick_s):
            now = time.monotonic()
            counts = self._observer.counts()
            # made progress, or was stopped itself
            if counts != self._counts or now - before > 10 * self._tick_s + 2.0:
                self._note_progress(counts, now)
            if now >= self._post_at:
                self._post_at = now + self._pause_s(now)
                try:
                    self._post(now)
                # the training thread loses the store, too, and reports it
                except LOST as error:
                    log.debug(
                        "the watchdog of rank %d lost the connection to the store: %s",
                        self._observer.rank,
                        error,
                    )
            before = now

    def _note_progress(self, counts: dict[str, int], now: float) -> None:
        """Begin anew after progress of this rank; a state that says that it waits is replaced at once."""
        self._counts = counts
        waited, self._quiet_since = now - self._quiet_since, now
        if waited >= self._look_s:
            self._post_at = now
        self._longest_s = max(self._longest_s, waited)
        if self._reported_key:
            log.warning("the ranks make progress again after %.0f s", waited)
            self._settings.noted(waited, True)
        self._reported_key = ()
        self._evidence.forget()
        self._observer.start_looking()

    def _post(self, now: float) -> None:
        """Post the state of this rank; diagnose on the reporting rank if it has started no collective for a while."""
        quiet_s = now - self._quiet_since
        if quiet_s < self._look_s:
            if self._is_reporter:
                self._is_reporter = False
                self._stall_store.stop_reporting()
            state = self._observer.look(quiet_s, self._counts)
            self._stall_store.post(msgspec.structs.replace(state, moves=True, stack=()))
            return
        if verdict := self._stall_store.verdict():
            # after the reporting rank, whose error the launcher prints
            self._end_job(verdict, 2.5)
        neighbours = [
            note
            for rank, note in self._stall_store.notes(self._local_ranks).items()
            if rank != self._observer.rank and not note.ended and _is_local(note)
        ]
        self._stall_store.post(
            self._observer.look(
                quiet_s, self._counts, processes.lost_neighbours(neighbours)
            )
        )
        if self._becomes_reporter(now):
            notes, states = (
                self._stall_store.notes(self._ranks),
                self._stall_store.states(self._ranks),
            )
            states = self._evidence.fresh(states, now)
            exit_codes = launcher_files.ended_ranks(env.snapshot())
            self._diagnose(_statuses_of(self._ranks, notes, states, exit_codes))

    def _becomes_reporter(self, now: float) -> bool:
        """Return whether this rank reports: rank 0, or the next waiting rank if those before it are silent."""
        if not self._is_reporter:
            delay_s = (
                0.25 * self._look_s * min(self._observer.rank, _LATEST_DELAYED_RANK)
            )
            reporter = self._stall_store.reporter()
            if reporter != self._last_reporter[0]:
                self._last_reporter = (reporter, now)
            silent_s = now - self._last_reporter[1]
            self._is_reporter = (
                silent_s > _SILENT_PAUSES * self._pause_s(now)
                if reporter
                else now - self._quiet_since > self._look_s + delay_s
            )
        if self._is_reporter:
            self._heartbeat_number += 1
            self._stall_store.post_heartbeat(self._heartbeat_number)
        return self._is_reporter

    def _pause_s(self, now: float) -> float:
        """Return the seconds until the next post."""
        quiet_s = now - self._quiet_since
        if quiet_s < self._look_s:
            return min(HEARTBEAT_TICKS * self._tick_s, self._look_s - quiet_s)
        return pause_s(self._tick_s, quiet_s)

    def _diagnose(self, world: list[SeenState]) -> None:
        diagnosis = diagnose(world, io_patience_s=self.after_s)
        if diagnosis is None:
            self._evidence.forget()
            return
        if not self._evidence.confirms(diagnosis, world):
            return
        waited_s = max(
            seen.state.quiet_s
            for seen in world
            if seen.rank in diagnosis.waiting and seen.state is not None
        )
        limit_s = self._limit_s(diagnosis)
        ends_job = self._settings.then == "abort" and waited_s >= limit_s
        is_certain = diagnosis.ends == "never"
        # A rank that arrived later has posted within its interval, and one that makes progress may still arrive.
        due_s = {
            "silent": self.after_s + 2 * self._look_s,
            "elsewhere": _LONG_FACTOR * self.after_s,
        }.get(diagnosis.cause, self.after_s)
        if diagnosis.key != self._reported_key and (
            ends_job or waited_s >= due_s or is_certain
        ):
            self._reported_key = diagnosis.key
            self._report(
                diagnosis, world, waited_s, self._consequence(ends_job, limit_s)
            )
        elif ends_job:
            log.error(
                "the job ends (exit code %d) after %.0f s: %s",
                ending.STALLED,
                waited_s,
                diagnosis.sentence,
            )
        if ends_job:
            self._stall_store.set_verdict(diagnosis.sentence)
            self._end_job(
                diagnosis.sentence,
                1.0,
                [seen.note for seen in world if seen.note and _is_local(seen.note)],
            )

    def _limit_s(self, diagnosis: Diagnosis) -> float:
        """Return the seconds of waiting after which the job is ended."""
        if diagnosis.cause == "stopped":  # a stopped rank can be resumed
            return (
                self.patience_s
                if self._settings.after_s is None
                else _LONG_FACTOR * self.after_s
            )
        return {"never": 0.0, "hardly": self.after_s, "perhaps": self.patience_s}[
            diagnosis.ends
        ]

    def _report(
        self,
        diagnosis: Diagnosis,
        world: list[SeenState],
        waited_s: float,
        consequence: str,
    ) -> None:
        self._settings.noted(waited_s, False)
        text = words.report(diagnosis, world, waited_s, consequence)
        path = _write_report(text, self._settings.folder)
        log.error("%s%s", text, f"\n  this report: {path}" if path else "")

    def _consequence(self, ends_job: bool, limit_s: float) -> str:
        if ends_job:
            return f"the job ends (exit code {ending.STALLED}); trust.stall=report would keep waiting"
        if self._settings.then == "report":
            return "the job keeps waiting (trust.stall=report)"
        return f"the job keeps waiting, and ends after {limit_s:.0f} s"

    def _end_job(
        self, summary: str, pause_s: float, others: Sequence[Note] = ()
    ) -> None:
        """End this process, unless its training thread does so first."""
        if not self._is_over.wait(pause_s):
            ending.end_process(summary, others)


def watchdog_of(
    ctx: ProcessContext, step: Callable[[], int], settings: WatchSettings
) -> Watchdog:
    """Return the watchdog of one of several ranks. `step` returns the number of updates."""
    assert isinstance(ctx.world, ProcessGroupComm), "there are other ranks"
    observer = Observer(ctx.rank, ctx.collectives, step, ctx.device.type)
    return Watchdog(
        observer, StallStore(ctx.world.store, ctx.rank), ctx.topology, settings
    )


def watch(owner: object, watchdog: Watchdog) -> None:
    """Start the watchdog; it is closed with `owner`, or at exit, when it posts the end of this rank."""
    watchdog.start()
    at_exit = partial(_post_end_of_process, weakref.ref(watchdog), os.getpid())
    # runs before the group is destroyed: handlers run in reverse order
    atexit.register(at_exit)
    weakref.finalize(owner, _unregister, watchdog, at_exit).atexit = False


def _unregister(watchdog: Watchdog, at_exit: Callable[[], None]) -> None:
    atexit.unregister(at_exit)
    watchdog.close()


def _post_end_of_process(ref: weakref.ref[Watchdog], pid: int) -> None:
    watchdog = ref()
    if watchdog is None or os.getpid() != pid:  # in a fork of the rank
        return
    error = getattr(sys, "last_value", None)
    at = f"at {time.strftime('%H:%M:%S')}"
    watchdog.close(
        at if error is None else f"{at} with {describe_error(error)}",
        failed=error is not None,
    )


def _is_local(note: Note) -> bool:
    """Return whether the note's pid is valid in this process: the same machine and the same container."""
    return note.host == socket.gethostname() and note.namespace == processes.namespace()


def _statuses_of(
    ranks: range,
    notes: dict[int, Note],
    states: dict[int, State],
    exit_codes: dict[int, int],
) -> list[SeenState]:
    """Return every rank's status: from its posted end, the launcher, its neighbours, or its posted state."""
    seen_by_others = {
        rank: status
        for state in states.values()
        for rank, status in state.peers.items()
    }
    world = []
    for rank in ranks:
        note, state = notes.get(rank), states.get(rank)
        status: Status = "here" if state is not None else "silent"
        if note is not None and note.ended:
            status = "failed" if note.failed else "left"
        elif rank in exit_codes:
            status = "left" if exit_codes[rank] == 0 else "gone"
        elif rank in seen_by_others:
            status = seen_by_others[rank]
        # states posted before a rank was stopped or ended are outdated
        world.append(SeenState(rank, status, state if status == "here" else None, note))
    return world


def _write_report(text: str, folder: Path) -> Path | None:
    path = folder / f"stall-{time.strftime('%Y%m%d-%H%M%S')}.txt"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    # a full or dead disk may have caused the stall: the log has the report
    except OSError:
        return None
    return path
