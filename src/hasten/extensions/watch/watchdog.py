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
from hasten.extensions.watch.diagnose import Diagnosis, diagnose_stall
from hasten.extensions.watch.evidence import HEARTBEAT_TICKS, Evidence, pause_s
from hasten.extensions.watch.observe import Observer, describe_error
from hasten.extensions.watch.stall_store import StallStore
from hasten.extensions.watch.state import Note, ObservedRank, State, Status
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
    reaction: Literal["abort", "report"] = "abort"
    timeout_s: float = 1800.0
    """The timeout of the process group."""
    folder: Path = field(default_factory=Path)
    """Folder of the reports."""
    notify_stall: Callable[[float, bool], None] = lambda _seconds, _over: None
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
            target=self._watch_ranks, name="hasten-watchdog", daemon=True
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
        self._stall_store.post_note(self._observer.make_note())
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
                self._stall_store.post_end(self._observer.make_note(ended, failed))
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

    def _watch_ranks(self) -> None:
        last_tick_s = self._quiet_since = time.monotonic()
        while not self._is_over.wait(self._tick_s):
            now_s = time.monotonic()
            collective_counts = self._observer.read_counts()
            # made progress, or was stopped itself
            if (
                collective_counts != self._counts
                or now_s - last_tick_s > 10 * self._tick_s + 2.0
            ):
                self._note_progress(collective_counts, now_s)
            if now_s >= self._post_at:
                self._post_at = now_s + self._pause_s(now_s)
                try:
                    self._post_state(now_s)
                # the training thread loses the store, too, and reports it
                except LOST as error:
                    log.debug(
                        "the watchdog of rank %d lost the connection to the store: %s",
                        self._observer.rank,
                        error,
                    )
            last_tick_s = now_s

    def _note_progress(self, collective_counts: dict[str, int], now_s: float) -> None:
        """Begin anew after progress of this rank; a state that says that it waits is replaced at once."""
        self._counts = collective_counts
        waited = now_s - self._quiet_since
        self._quiet_since = now_s
        if waited >= self._look_s:
            self._post_at = now_s
        self._longest_s = max(self._longest_s, waited)
        if self._reported_key:
            log.warning("the ranks make progress again after %.0f s", waited)
            self._settings.notify_stall(waited, True)
        self._reported_key = ()
        self._evidence.forget_observation()
        self._observer.start_looking()

    def _post_state(self, now_s: float) -> None:
        """Post the state of this rank; diagnose on the reporting rank if it has started no collective for a while."""
        quiet_s = now_s - self._quiet_since
        if quiet_s < self._look_s:
            if self._is_reporter:
                self._is_reporter = False
                self._stall_store.stop_reporting()
            rank_state = self._observer.observe_thread(quiet_s, self._counts)
            self._stall_store.post_state(
                msgspec.structs.replace(rank_state, moves=True, stack=())
            )
            return
        if verdict := self._stall_store.read_verdict():
            # after the reporting rank, whose error the launcher prints
            self._end_job(verdict, 2.5)
        neighbours = []
        for rank, rank_note in self._stall_store.read_notes(self._local_ranks).items():
            if (
                rank != self._observer.rank
                and not rank_note.ended
                and _is_local(rank_note)
            ):
                neighbours.append(rank_note)
        self._stall_store.post_state(
            self._observer.observe_thread(
                quiet_s, self._counts, processes.lost_neighbours(neighbours)
            )
        )
        if self._becomes_reporter(now_s):
            rank_notes = self._stall_store.read_notes(self._ranks)
            rank_states = self._stall_store.read_states(self._ranks)
            rank_states = self._evidence.current_states(rank_states, now_s)
            exit_codes = launcher_files.ended_ranks(env.snapshot())
            self._diagnose_ranks(
                _statuses_of(self._ranks, rank_notes, rank_states, exit_codes)
            )

    def _becomes_reporter(self, now_s: float) -> bool:
        """Return whether this rank reports: rank 0, or the next waiting rank if those before it are silent."""
        if not self._is_reporter:
            delay_s = (
                0.25 * self._look_s * min(self._observer.rank, _LATEST_DELAYED_RANK)
            )
            reporter = self._stall_store.read_reporter()
            if reporter != self._last_reporter[0]:
                self._last_reporter = (reporter, now_s)
            silent_s = now_s - self._last_reporter[1]
            if reporter:
                self._is_reporter = silent_s > _SILENT_PAUSES * self._pause_s(now_s)
            else:
                self._is_reporter = now_s - self._quiet_since > self._look_s + delay_s
        if self._is_reporter:
            self._heartbeat_number += 1
            self._stall_store.post_heartbeat(self._heartbeat_number)
        return self._is_reporter

    def _pause_s(self, now_s: float) -> float:
        """Return the seconds until the next post."""
        quiet_s = now_s - self._quiet_since
        if quiet_s < self._look_s:
            return min(HEARTBEAT_TICKS * self._tick_s, self._look_s - quiet_s)
        return pause_s(self._tick_s, quiet_s)

    def _diagnose_ranks(self, observed_ranks: list[ObservedRank]) -> None:
        diagnosis = diagnose_stall(observed_ranks, io_patience_s=self.after_s)
        if diagnosis is None:
            self._evidence.forget_observation()
            return
        if not self._evidence.confirms_diagnosis(diagnosis, observed_ranks):
            return
        waited_s = max(
            observed_rank.state.quiet_s
            for observed_rank in observed_ranks
            if observed_rank.rank in diagnosis.waiting
            and observed_rank.state is not None
        )
        limit_s = self._limit_s(diagnosis)
        ends_job = self._settings.reaction == "abort" and waited_s >= limit_s
        is_certain = diagnosis.wait_end == "never"
        # A rank that arrived later has posted within its interval, and one that makes progress may still arrive.
        due_s = {
            "silent": self.after_s + 2 * self._look_s,
            "elsewhere": _LONG_FACTOR * self.after_s,
        }.get(diagnosis.cause, self.after_s)
        if diagnosis.key != self._reported_key and (
            ends_job or waited_s >= due_s or is_certain
        ):
            self._reported_key = diagnosis.key
            self._write_stall_report(
                diagnosis,
                observed_ranks,
                waited_s,
                self._describe_consequence(ends_job, limit_s),
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
            local_notes = []
            for observed_rank in observed_ranks:
                if observed_rank.note and _is_local(observed_rank.note):
                    local_notes.append(observed_rank.note)
            self._end_job(
                diagnosis.sentence,
                1.0,
                local_notes,
            )

    def _limit_s(self, diagnosis: Diagnosis) -> float:
        """Return the seconds of waiting after which the job is ended."""
        if diagnosis.cause == "stopped":  # a stopped rank can be resumed
            if self._settings.after_s is None:
                return self.patience_s
            return _LONG_FACTOR * self.after_s
        return {"never": 0.0, "hardly": self.after_s, "perhaps": self.patience_s}[
            diagnosis.wait_end
        ]

    def _write_stall_report(
        self,
        diagnosis: Diagnosis,
        observed_ranks: list[ObservedRank],
        waited_s: float,
        consequence: str,
    ) -> None:
        self._settings.notify_stall(waited_s, False)
        text = words.render_report(diagnosis, observed_ranks, waited_s, consequence)
        socket_path = _write_report(text, self._settings.folder)
        report_line = f"\n  this report: {socket_path}" if socket_path else ""
        log.error("%s%s", text, report_line)

    def _describe_consequence(self, ends_job: bool, limit_s: float) -> str:
        if ends_job:
            return f"the job ends (exit code {ending.STALLED}); trust.stall=report would keep waiting"
        if self._settings.reaction == "report":
            return "the job keeps waiting (trust.stall=report)"
        return f"the job keeps waiting, and ends after {limit_s:.0f} s"

    def _end_job(
        self, summary: str, pause_s: float, other_notes: Sequence[Note] = ()
    ) -> None:
        """End this process, unless its training thread does so first."""
        if not self._is_over.wait(pause_s):
            ending.end_process(summary, other_notes)


def watchdog_of(
    ctx: ProcessContext, step: Callable[[], int], settings: WatchSettings
) -> Watchdog:
    """Return the watchdog of one of several ranks. `step` returns the number of updates."""
    assert isinstance(ctx.world, ProcessGroupComm), "there are other ranks"
    observer = Observer(ctx.rank, ctx.collectives, step, ctx.device.type)
    return Watchdog(
        observer, StallStore(ctx.world.store, ctx.rank), ctx.topology, settings
    )


def start_watchdog(owner: object, watchdog: Watchdog) -> None:
    """Start the watchdog; it is closed with `owner`, or at exit, when it posts the end of this rank."""
    watchdog.start()
    at_exit = partial(_post_end_of_process, weakref.ref(watchdog), os.getpid())
    # runs before the group is destroyed: handlers run in reverse order
    atexit.register(at_exit)
    weakref.finalize(owner, _close_watchdog, watchdog, at_exit).atexit = False


def _close_watchdog(watchdog: Watchdog, at_exit: Callable[[], None]) -> None:
    atexit.unregister(at_exit)
    watchdog.close()


def _post_end_of_process(ref: weakref.ref[Watchdog], pid: int) -> None:
    watchdog = ref()
    if watchdog is None or os.getpid() != pid:  # in a fork of the rank
        return
    error = getattr(sys, "last_value", None)
    end_time_words = f"at {time.strftime('%H:%M:%S')}"
    if error is None:
        end_words = end_time_words
    else:
        end_words = f"{end_time_words} with {describe_error(error)}"
    watchdog.close(
        end_words,
        failed=error is not None,
    )


def _is_local(rank_note: Note) -> bool:
    """Return whether the note's pid is valid in this process: the same machine and the same container."""
    return (
        rank_note.host == socket.gethostname()
        and rank_note.namespace == processes.pid_namespace()
    )


def _statuses_of(
    rank_numbers: range,
    rank_notes: dict[int, Note],
    rank_states: dict[int, State],
    exit_codes: dict[int, int],
) -> list[ObservedRank]:
    """Return every rank's status: from its posted end, the launcher, its neighbours, or its posted state."""
    seen_by_others: dict[int, Status] = {}
    for other_state in rank_states.values():
        seen_by_others |= other_state.peers
    observed_ranks = []
    for rank in rank_numbers:
        rank_note = rank_notes.get(rank)
        rank_state = rank_states.get(rank)
        status: Status = "here" if rank_state is not None else "silent"
        if rank_note is not None and rank_note.ended:
            status = "failed" if rank_note.failed else "left"
        elif rank in exit_codes:
            status = "left" if exit_codes[rank] == 0 else "gone"
        elif rank in seen_by_others:
            status = seen_by_others[rank]
        # states posted before a rank was stopped or ended are outdated
        observed_ranks.append(
            ObservedRank(
                rank, status, rank_state if status == "here" else None, rank_note
            )
        )
    return observed_ranks


def _write_report(text: str, folder: Path) -> Path | None:
    socket_path = folder / f"stall-{time.strftime('%Y%m%d-%H%M%S')}.txt"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        socket_path.write_text(text + "\n")
    # a full or dead disk may have caused the stall: the log has the report
    except OSError:
        return None
    return socket_path
