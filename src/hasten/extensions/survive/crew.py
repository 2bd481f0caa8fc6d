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
from hasten.extensions.survive.folder import AGREED, FINISHED, JOINED, STOPPING
from hasten.extensions.survive.replica_machines import (
    MachineNetwork,
    MachineNotes,
    RunNotes,
)
from hasten.extensions.survive.replica_processes import ReplicaProcesses, start
from hasten.extensions.survive.settings import SurviveSettings
from hasten.launch import guard
from hasten.launch.base import Proc
from hasten.launch.failure import PREEMPTED, Failure, end_words, render_failure
from hasten.launch.guard import SAVING, kill_groups

_POLL_S: Final = 0.05
_QUICK_S: Final = 60.0
_QUICK_FAILURES: Final = 3
"""Errors of a replica's own program, one after the other and each soon after its start, after which it is not started again."""
_GRACE_S: Final = 15.0
"""Seconds that replicas have to end after Ctrl-C."""
_TOLD_S: Final = 1.0
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
    _since: float = 0.0
    _waiting: dict[int, tuple[int, float]] = field(default_factory=dict)
    """Replicas to be started: the number of their errors, and the earliest time."""
    _restarts: int = 0
    _finished: float | None = None
    _is_held: bool = False
    """True if a replica, of any machine, held the run's state at the latest look."""
    _codes: list[int] = field(default_factory=list)
    """Exit codes of replicas that ended after the signal to stop, or were preempted alone."""
    _last: Failure | None = None
    _run: RunNotes = field(default_factory=RunNotes)

    def run(self) -> int:
        """Start this machine's replicas, and lost ones again, until the run is over."""
        self._waiting = dict.fromkeys(self.numbers, (0, 0.0))
        try:
            while self._goes_on():
                self._look()
                self._tell()
                self._start_anew()
                self._pass_on()
                self._hurry()
                time.sleep(_POLL_S)
        finally:
            self._kill()
        return self._result()

    def _goes_on(self) -> bool:
        """Return False when the run is over for this machine."""
        if self._run.code is not None:
            return False
        if self.network.broken_s > self.patience_s:
            return False
        if self.workers or self._waiting:
            return True
        # the lighthouse is here: replicas of other machines need it
        if self.network.rank == 0:
            return self._run.running > 0
        return self.stopped_by is None  # machine 0 tells when the run is over

    def _start(self, number: int, quick: int = 0) -> None:
        count = self.proc.count
        common = {**self.common, "HASTEN_SURVIVE_REPLICA": str(number)}
        if self.num_devices:
            first = (number - self.numbers[0]) * count
            devices = [(first + rank) % self.num_devices for rank in range(count)]
            common["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, devices))
        error_file = str(self.folder / f"error-{number}-{self._restarts}")
        self.workers[number] = start(self.proc, common, error_file, quick)

    def _look(self) -> None:
        for number, worker in list(self.workers.items()):
            found = worker.look()
            saves = self.stopped_by is not None or (
                found is not None and found[1] == PREEMPTED
            )
            # after a signal, ranks may save as long as the grace lasts
            if found is None or (saves and worker.running):
                continue
            rank, code = found
            worker.end()  # a replica trains with all of its ranks, or not at all
            del self.workers[number]
            (self.folder / f"{JOINED}{number}").unlink(missing_ok=True)
            if code == 0:
                self._finished = self._finished or time.monotonic()
                (self.folder / FINISHED).touch()
            elif self.stopped_by is not None:
                self._codes.append(code)
                self._last = worker.failure(rank, code)
            elif self._finished is None:
                self._lost(number, worker, rank, code)
        if self._finished is not None or self.stopped_by is not None:
            self._waiting = {}
        for number, (quick, due) in list(self._waiting.items()):
            if time.monotonic() >= due and not self.network.broken_s:
                self._start(number, quick)
                del self._waiting[number]

    def _start_anew(self) -> None:
        """End and start the replicas that are left once the last one that held the run's state was lost.

        They have the state with which their scripts began; new ones load the newest checkpoint, if the script loads any.
        """
        was_held, self._is_held = self._is_held, any(self.folder.glob(f"{JOINED}*"))
        if (
            self._is_held
            or not was_held
            or self._finished is not None
            or self.stopped_by is not None
        ):
            return
        say(
            "every replica that held the run's state is lost. All replicas start the script again: it continues from the newest checkpoint if "
            "it calls load_state(must_exist=False), and from the beginning otherwise"
        )
        for number, worker in self.workers.items():
            worker.end()
            self._waiting[number] = (0, 0.0)
        self.workers.clear()

    def _lost(
        self, number: int, worker: ReplicaProcesses, rank: int, code: int
    ) -> None:
        self._last = worker.failure(rank, code)
        is_programs_error = code > 0 and code != PREEMPTED
        is_quick = time.monotonic() - worker.began < _QUICK_S
        quick = worker.quick + 1 if is_programs_error and is_quick else 0
        if error := self._last.traceback.rstrip():
            say(f"the error of replica {number}:\n{error}")
        cause = f"rank {rank} of replica {number} ended with {end_words(code)}"
        if quick >= _QUICK_FAILURES:
            say(
                f"{cause}; the replica is not started again, {len(self.workers)} are left"
            )
            return
        self._restarts += 1
        say(f"{cause}; the replica is started again, {len(self.workers)} continue")
        due = 0.0
        # the signal may have been for the whole run, and this launcher learns it a moment later
        if code == PREEMPTED:
            self._codes.append(code)
            due = time.monotonic() + _TOLD_S
        self._waiting[number] = (quick, due)

    # -- other machines --------------------------------------------------------------------------------------------
    def _tell(self) -> None:
        """Tell the other machines what the replicas of this one have noted in the folder, and note what the others have told."""
        run = self._run = self.network.exchange(self._notes(), self.stopped_by)
        agreed = self.folder / AGREED
        if run.agreed and run.agreed != _agreement(self.folder):
            draft = self.folder / f"{AGREED}.launcher"
            draft.write_text(run.agreed)
            draft.replace(agreed)
        if run.finished and self._finished is None:
            self._finished = time.monotonic()
            (self.folder / FINISHED).touch()
        noted = {
            path.name.removeprefix(JOINED) for path in self.folder.glob(f"{JOINED}*")
        }
        own = set(map(str, self.numbers))
        for name in set(run.joined) - noted - own:
            (self.folder / f"{JOINED}{name}").touch()
        for name in noted - set(run.joined) - own:
            (self.folder / f"{JOINED}{name}").unlink(missing_ok=True)

    def _notes(self) -> MachineNotes:
        return MachineNotes(
            running=len(self.workers) + len(self._waiting),
            joined=[
                str(number)
                for number in self.workers
                if (self.folder / f"{JOINED}{number}").exists()
            ],
            agreed=_agreement(self.folder),
            finished=self._finished is not None,
        )

    # -- the end ---------------------------------------------------------------------------------------------------
    def _pass_on(self) -> None:
        """Send the signal to stop to the replicas that have not received it; they end together if the whole run was told to stop."""
        if self.stopped_by is None and self._run.stop is not None:
            self.stopped_by, self._since = self._run.stop, time.monotonic()
        if self.stopped_by is None:
            return
        whole = self.network.rank == 0 or self._run.stop is not None
        if not whole and time.monotonic() - self._since < _TOLD_S:
            return
        if whole:
            (self.folder / STOPPING).touch()
        for worker in self.workers.values():
            if not worker.signalled:
                worker.signalled = True
                worker.send(self.stopped_by)

    def _hurry(self) -> None:
        """End replicas that are still there long after the run was finished, or after a signal."""
        now, survive = time.monotonic(), self.config.section(SurviveSettings)
        late = (
            self._finished is not None and now - self._finished > survive.hang_timeout_s
        )
        grace_s = (
            self.config.launch.stop_grace_s if self.stopped_by in SAVING else _GRACE_S
        )
        if late or (self.stopped_by is not None and now - self._since > grace_s):
            self._kill()

    def _kill(self) -> None:
        for worker in self.workers.values():
            kill_groups(worker.groups)

    def _result(self) -> int:
        if self._run.code is not None:
            return self._run.code
        if self._finished is not None:
            return 0
        if self.stopped_by is not None:
            return self._stopped(self.stopped_by)
        if self.network.broken_s:
            say(
                f"machine 0 does not respond for {self.network.broken_s:.0f} s, and the lighthouse is there: the run has ended. Start it again from a "
                "checkpoint."
            )
            return 1
        if self._last is None:
            return 1
        failure = self._last
        say(render_failure([failure], python=sys.executable))
        return failure.exit_code or 1

    def _stopped(self, number: int) -> int:
        """Return the exit code after a signal: that of a saved run if the replicas have saved, and none of them has failed.

        A replica that the signal ends is one that had no handler yet: it was being started, and the others save without it.
        """
        name = signal.Signals(number).name
        failed = [code for code in self._codes if code not in (PREEMPTED, -number)]
        if failed:
            return failed[0] if failed[0] > 0 else 128 + number
        if PREEMPTED in self._codes:
            say(
                f"{name}: the run was saved, and its replicas have ended; start it again to continue"
            )
            return PREEMPTED
        return 128 + number

    @contextmanager
    def stopping(self) -> Iterator[None]:
        """Context manager in which signals end all replicas; a second signal kills them, unless schedulers repeat it."""

        def receive(number: int, frame: FrameType | None) -> None:
            if self.stopped_by in SAVING and number in SAVING:
                return  # a repeated signal must not interrupt a save
            if self.stopped_by is not None:
                self._kill()
                return
            self.stopped_by, self._since = number, time.monotonic()

        old = {number: signal.signal(number, receive) for number in guard.STOPPING}
        try:
            yield
        finally:
            for number, handler in old.items():
                signal.signal(number, handler)


def _agreement(folder: Path) -> str:
    """Return the update and the history on which the replicas have agreed last; empty before the first."""
    return (folder / AGREED).read_text() if (folder / AGREED).exists() else ""


def say(text: str) -> None:
    sys.stdout.flush()
    sys.stderr.write(f"[hasten] {text}\n")
    sys.stderr.flush()
