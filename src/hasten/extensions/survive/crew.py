"""The processes of this machine's replicas: started, watched, started again, and ended with the run."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Final

from hasten.config.root import Config
from hasten.extensions.survive.folder import (
    AGREED_FILE,
    FINISHED_FILE,
    JOINED_PREFIX,
    STOPPING_FILE,
)
from hasten.extensions.survive.replica_machines import (
    MachineNetwork,
    MachineNotes,
    RunNotes,
)
from hasten.extensions.survive.replica_processes import ReplicaProcesses, start_replica
from hasten.extensions.survive.settings import SurviveSettings
from hasten.launch import guard
from hasten.launch.base import Proc
from hasten.launch.failure import PREEMPTED, Failure, end_words, render_failure
from hasten.launch.guard import SAVING, kill_groups

_POLL_INTERVAL_S: Final = 0.05
_QUICK_FAILURE_S: Final = 60.0
_MAX_QUICK_FAILURES: Final = 3
"""Errors of a replica's own program, one after the other and each soon after its start, after which it is not started again."""
_INTERRUPT_GRACE_S: Final = 15.0
"""Seconds that replicas have to end after Ctrl-C."""
_NEWS_TIMEOUT_S: Final = 1.0
"""Seconds for which a machine that was told to stop waits for the news that the whole run was."""


@dataclass(slots=True)
class Crew:
    """The processes of this machine's replicas."""

    proc: Proc
    common: Mapping[str, str]
    folder: Path
    config: Config
    numbers: range
    network: MachineNetwork
    num_devices: int = 0
    patience_s: float = 120.0
    """Seconds for which a machine waits for machine 0 when that does not respond."""
    workers: dict[int, ReplicaProcesses] = field(default_factory=dict)
    stopped_by: int | None = None
    _stopped_at_s: float = 0.0
    _due_starts: dict[int, tuple[int, float]] = field(default_factory=dict)
    """Replicas to be started: the number of their errors, and the earliest time."""
    _restarts: int = 0
    _finished_at_s: float | None = None
    _is_held: bool = False
    """True if a replica, of any machine, held the run's state at the latest look."""
    _exit_codes: list[int] = field(default_factory=list)
    """Exit codes of replicas that ended after the signal to stop, or were preempted alone."""
    _last_failure: Failure | None = None
    _run: RunNotes = field(default_factory=RunNotes)

    def run_replicas(self) -> int:
        """Start this machine's replicas, and lost ones again, until the run is over."""
        self._due_starts = dict.fromkeys(self.numbers, (0, 0.0))
        try:
            while self._is_running():
                self._collect_ended_replicas()
                self._exchange_notes()
                self._restart_without_holders()
                self._pass_signal_on()
                self._kill_late_replicas()
                time.sleep(_POLL_INTERVAL_S)
        finally:
            self._kill_replicas()
        return self._find_exit_code()

    def _is_running(self) -> bool:
        """Return False when the run is over for this machine."""
        if self._run.code is not None:
            return False
        if self.network.broken_s > self.patience_s:
            return False
        if self.workers or self._due_starts:
            return True
        # the lighthouse is here: replicas of other machines need it
        if self.network.rank == 0:
            return self._run.running > 0
        return self.stopped_by is None  # machine 0 tells when the run is over

    def _start_replica(self, replica_number: int, num_quick_failures: int = 0) -> None:
        count = self.proc.count
        variables = {**self.common, "HASTEN_SURVIVE_REPLICA": str(replica_number)}
        if self.num_devices:
            first_device = (replica_number - self.numbers[0]) * count
            devices = [
                (first_device + rank) % self.num_devices for rank in range(count)
            ]
            variables["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, devices))
        error_file = str(self.folder / f"error-{replica_number}-{self._restarts}")
        self.workers[replica_number] = start_replica(
            self.proc, variables, error_file, num_quick_failures
        )

    def _collect_ended_replicas(self) -> None:
        for replica_number, worker in list(self.workers.items()):
            ended_rank = worker.find_ended_rank()
            may_save = self.stopped_by is not None or (
                ended_rank is not None and ended_rank[1] == PREEMPTED
            )
            # after a signal, ranks may save as long as the grace lasts
            if ended_rank is None or (may_save and worker.running):
                continue
            rank, exit_code = ended_rank
            worker.kill_processes()  # a replica trains with all of its ranks, or not at all
            del self.workers[replica_number]
            (self.folder / f"{JOINED_PREFIX}{replica_number}").unlink(missing_ok=True)
            if exit_code == 0:
                self._finished_at_s = self._finished_at_s or time.monotonic()
                (self.folder / FINISHED_FILE).touch()
            elif self.stopped_by is not None:
                self._exit_codes.append(exit_code)
                self._last_failure = worker.read_failure_of(rank, exit_code)
            elif self._finished_at_s is None:
                self._plan_restart(replica_number, worker, rank, exit_code)
        if self._finished_at_s is not None or self.stopped_by is not None:
            self._due_starts = {}
        for replica_number, (num_quick_failures, due_s) in list(
            self._due_starts.items()
        ):
            if time.monotonic() >= due_s and not self.network.broken_s:
                self._start_replica(replica_number, num_quick_failures)
                del self._due_starts[replica_number]

    def _restart_without_holders(self) -> None:
        """End and start the replicas that are left once the last one that held the run's state was lost.

        They have the state with which their scripts began; new ones load the newest checkpoint, if the script loads any.
        """
        was_held = self._is_held
        self._is_held = any(self.folder.glob(f"{JOINED_PREFIX}*"))
        if (
            self._is_held
            or not was_held
            or self._finished_at_s is not None
            or self.stopped_by is not None
        ):
            return
        print_message(
            "every replica that held the run's state is lost. All replicas start the script again: it continues from the newest checkpoint if "
            "it calls load_state(must_exist=False), and from the beginning otherwise"
        )
        for replica_number, worker in self.workers.items():
            worker.kill_processes()
            self._due_starts[replica_number] = (0, 0.0)
        self.workers.clear()

    def _plan_restart(
        self, replica_number: int, worker: ReplicaProcesses, rank: int, exit_code: int
    ) -> None:
        self._last_failure = worker.read_failure_of(rank, exit_code)
        is_programs_error = exit_code > 0 and exit_code != PREEMPTED
        is_quick = time.monotonic() - worker.began_s < _QUICK_FAILURE_S
        num_quick_failures = 0
        if is_programs_error and is_quick:
            num_quick_failures = worker.quick + 1
        if error_text := self._last_failure.traceback.rstrip():
            print_message(f"the error of replica {replica_number}:\n{error_text}")
        cause = (
            f"rank {rank} of replica {replica_number} ended with {end_words(exit_code)}"
        )
        if num_quick_failures >= _MAX_QUICK_FAILURES:
            print_message(
                f"{cause}; the replica is not started again, {len(self.workers)} are left"
            )
            return
        self._restarts += 1
        print_message(
            f"{cause}; the replica is started again, {len(self.workers)} continue"
        )
        due_s = 0.0
        # the signal may have been for the whole run, and this launcher learns it a moment later
        if exit_code == PREEMPTED:
            self._exit_codes.append(exit_code)
            due_s = time.monotonic() + _NEWS_TIMEOUT_S
        self._due_starts[replica_number] = (num_quick_failures, due_s)

    # -- other machines --------------------------------------------------------------------------------------------
    def _exchange_notes(self) -> None:
        """Tell the other machines what the replicas of this one have noted in the folder, and note what the others have told."""
        run_notes = self._run = self.network.exchange_notes(
            self._collect_notes(), self.stopped_by
        )
        agreed_file = self.folder / AGREED_FILE
        if run_notes.agreed and run_notes.agreed != _read_agreement(self.folder):
            draft_file = self.folder / f"{AGREED_FILE}.launcher"
            draft_file.write_text(run_notes.agreed)
            draft_file.replace(agreed_file)
        if run_notes.finished and self._finished_at_s is None:
            self._finished_at_s = time.monotonic()
            (self.folder / FINISHED_FILE).touch()
        noted_names = set()
        for path in self.folder.glob(f"{JOINED_PREFIX}*"):
            noted_names.add(path.name.removeprefix(JOINED_PREFIX))
        own_names = set(map(str, self.numbers))
        for replica_name in set(run_notes.joined) - noted_names - own_names:
            (self.folder / f"{JOINED_PREFIX}{replica_name}").touch()
        for replica_name in noted_names - set(run_notes.joined) - own_names:
            (self.folder / f"{JOINED_PREFIX}{replica_name}").unlink(missing_ok=True)

    def _collect_notes(self) -> MachineNotes:
        joined_names = []
        for replica_number in self.workers:
            if (self.folder / f"{JOINED_PREFIX}{replica_number}").exists():
                joined_names.append(str(replica_number))
        return MachineNotes(
            running=len(self.workers) + len(self._due_starts),
            joined=joined_names,
            agreed=_read_agreement(self.folder),
            finished=self._finished_at_s is not None,
        )

    # -- the end ---------------------------------------------------------------------------------------------------
    def _pass_signal_on(self) -> None:
        """Send the signal to stop to the replicas that have not received it; they end together if the whole run was told to stop."""
        if self.stopped_by is None and self._run.stop is not None:
            self.stopped_by = self._run.stop
            self._stopped_at_s = time.monotonic()
        if self.stopped_by is None:
            return
        stops_whole_run = self.network.rank == 0 or self._run.stop is not None
        if (
            not stops_whole_run
            and time.monotonic() - self._stopped_at_s < _NEWS_TIMEOUT_S
        ):
            return
        if stops_whole_run:
            (self.folder / STOPPING_FILE).touch()
        for worker in self.workers.values():
            if not worker.signalled:
                worker.signalled = True
                worker.send_signal(self.stopped_by)

    def _kill_late_replicas(self) -> None:
        """End replicas that are still there long after the run was finished, or after a signal."""
        now_s = time.monotonic()
        settings = self.config.section(SurviveSettings)
        is_late = (
            self._finished_at_s is not None
            and now_s - self._finished_at_s > settings.hang_timeout_s
        )
        if self.stopped_by in SAVING:
            grace_s = self.config.launch.stop_grace_s
        else:
            grace_s = _INTERRUPT_GRACE_S
        if is_late or (
            self.stopped_by is not None and now_s - self._stopped_at_s > grace_s
        ):
            self._kill_replicas()

    def _kill_replicas(self) -> None:
        for worker in self.workers.values():
            kill_groups(worker.groups)

    def _find_exit_code(self) -> int:
        if self._run.code is not None:
            return self._run.code
        if self._finished_at_s is not None:
            return 0
        if self.stopped_by is not None:
            return self._exit_code_after_signal(self.stopped_by)
        if self.network.broken_s:
            print_message(
                f"machine 0 does not respond for {self.network.broken_s:.0f} s, and the lighthouse is there: the run has ended. Start it again from a "
                "checkpoint."
            )
            return 1
        if self._last_failure is None:
            return 1
        last_failure = self._last_failure
        print_message(render_failure([last_failure], python=sys.executable))
        return last_failure.exit_code or 1

    def _exit_code_after_signal(self, signal_number: int) -> int:
        """Return the exit code after a signal: that of a saved run if the replicas have saved, and none of them has failed.

        A replica that the signal ends is one that had no handler yet: it was being started, and the others save without it.
        """
        signal_name = signal.Signals(signal_number).name
        failed_codes = []
        for exit_code in self._exit_codes:
            if exit_code not in (PREEMPTED, -signal_number):
                failed_codes.append(exit_code)
        if failed_codes:
            return failed_codes[0] if failed_codes[0] > 0 else 128 + signal_number
        if PREEMPTED in self._exit_codes:
            print_message(
                f"{signal_name}: the run was saved, and its replicas have ended; start it again to continue"
            )
            return PREEMPTED
        return 128 + signal_number

    @contextmanager
    def handle_signals(self) -> Iterator[None]:
        """Context manager in which signals end all replicas; a second signal kills them, unless schedulers repeat it."""

        def receive_signal(signal_number: int, frame: FrameType | None) -> None:
            if self.stopped_by in SAVING and signal_number in SAVING:
                return  # a repeated signal must not interrupt a save
            if self.stopped_by is not None:
                self._kill_replicas()
                return
            self.stopped_by = signal_number
            self._stopped_at_s = time.monotonic()

        old_handlers = {
            signal_number: signal.signal(signal_number, receive_signal)
            for signal_number in guard.STOPPING
        }
        try:
            yield
        finally:
            for signal_number, handler in old_handlers.items():
                signal.signal(signal_number, handler)


def _read_agreement(folder: Path) -> str:
    """Return the update and the history on which the replicas have agreed last; empty before the first."""
    if (folder / AGREED_FILE).exists():
        return (folder / AGREED_FILE).read_text()
    return ""


def print_message(message: str) -> None:
    sys.stdout.flush()
    sys.stderr.write(f"[hasten] {message}\n")
    sys.stderr.flush()
