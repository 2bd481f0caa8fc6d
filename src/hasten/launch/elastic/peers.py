"""State of the other machines while the job runs: heartbeats, failures, exit codes and completion.

A scheduler that started one launcher per machine ends the others as soon as the first exits with a nonzero code
(`srun --kill-on-bad-exit`, `mpirun`), and uses the highest code as the job's. So no launcher may exit before all know the code.
"""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from hasten.errors import LaunchError
from hasten.launch.checkin import Store
from hasten.launch.failure import PREEMPTED, Failure
from hasten.runtime import env as environment
from hasten.runtime import launcher_files

COLLECT_TIMEOUT_S: Final = 3.0
_HEARTBEAT_TIMEOUT_S: Final = 60.0
_POLL_TIMEOUT_S: Final = 25.0
_POLL_INTERVAL_S: Final = 1.0
_EXIT_HEARTBEAT_TIMEOUT_S: Final = 10.0
_STOPPING: Final = "stopping"
# the thread is a daemon: one that is stuck in a dead connection is abandoned
_CLOSE_TIMEOUT_S: Final = 0.5


class PeerMachineFailed(LaunchError):
    """Raised when another machine has failed; `failures` holds its failures."""

    def __init__(
        self, message: str, failures: Sequence[Failure] = (), code: int = 1
    ) -> None:
        super().__init__(message)
        self.failures = tuple(failures)
        self.code = code


class MachineLost(LaunchError):
    """Raised when another machine no longer responds; it may reconnect."""


@dataclass(slots=True)
class Peers:
    """The machines of one round; this machine has position `index`."""

    store: Store
    index: int
    hosts: tuple[str, ...]
    round: int
    _beat: int = 0
    ended: dict[int, int] = field(default_factory=dict)
    """Exit codes of this machine's ranks that have ended; shared by copies of this object."""
    _last_beats: dict[int, tuple[str, float]] = field(default_factory=dict)

    def key(self, topic: str, machine: int) -> str:
        """Return the key of what a machine publishes in this round."""
        return f"peers/{self.round}/{topic}/{machine}"

    def read_machines(self) -> None:
        """Send this machine's heartbeat, and check the heartbeats and failures of the others.

        Raises: PeerMachineFailed if a machine failed; MachineLost if a machine has been silent for a minute.
        """
        self._beat += 1
        self.store.set(self.key("beat", self.index), str(self._beat))
        if failures := self.published_failures():
            raise PeerMachineFailed(f"machine {failures[0].host} failed", failures)
        self._raise_for_stopped()
        now_s = time.monotonic()
        for machine, host in enumerate(self.hosts):
            if machine == self.index:
                continue
            beat_key = self.key("beat", machine)
            if self.store.check([beat_key]):
                beat = self.store.get(beat_key).decode()
            else:
                beat = ""
            last_beat, since_s = self._last_beats.setdefault(machine, (beat, now_s))
            if beat != last_beat:
                self._last_beats[machine] = (beat, now_s)
            elif now_s - since_s > _HEARTBEAT_TIMEOUT_S and not self.store.check(
                [self.key("done", machine)]
            ):
                raise MachineLost(
                    f"machine {machine} ({host}) has not responded for {_HEARTBEAT_TIMEOUT_S:g} s: it is down, or the network to it is. The job "
                    "cannot continue without it; check the machine, then restart the job."
                )

    def ended_anywhere(self) -> dict[int, int]:
        """Publish this machine's ended ranks, and return the exit codes of ended ranks on all machines."""
        exit_codes = dict(self.ended)
        self.store.set(
            self.key("ended", self.index), json.dumps(list(exit_codes.items()))
        )
        for machine in range(len(self.hosts)):
            ended_key = self.key("ended", machine)
            if machine != self.index and self.store.check([ended_key]):
                exit_codes.update(
                    {
                        int(rank): int(code)
                        for rank, code in json.loads(self.store.get(ended_key))
                    }
                )
        return exit_codes

    def _raise_for_stopped(self) -> None:
        for machine, code in self._exit_codes().items():
            if machine != self.index and code not in (0, PREEMPTED):
                raise PeerMachineFailed(
                    f"machine {machine} ({self.hosts[machine]}) was stopped (exit code {code}), and the job cannot continue without it. "
                    "Check its output.",
                    code=code,
                )

    def say_stopping(self) -> None:
        """Publish that this machine received a stop signal, so that the others do not restart the job."""
        self.store.set(_STOPPING, str(self.index))

    def is_stopping(self) -> bool:
        """Return whether any machine received a stop signal."""
        return self.store.check([_STOPPING])

    def agree_on_code(self, code: int, timeout_s: float) -> int:
        """Return the exit code of the job, once every machine has published its exit code.

        Machines that publish nothing for `timeout_s`, or whose heartbeat stops, are not waited for.
        """
        self.store.set(_exit_key(self.index), str(code))
        deadline_s = time.monotonic() + timeout_s
        last_beats = dict.fromkeys(range(len(self.hosts)), ("", time.monotonic()))
        while awaited_machines := [
            awaited_machine
            for awaited_machine in range(len(self.hosts))
            if not self.store.check([_exit_key(awaited_machine)])
        ]:
            now_s = time.monotonic()
            for machine in awaited_machines:
                beat_key = self.key("beat", machine)
                if self.store.check([beat_key]):
                    beat = self.store.get(beat_key).decode()
                else:
                    beat = ""
                if beat != last_beats[machine][0]:
                    last_beats[machine] = (beat, now_s)
            if now_s > deadline_s or all(
                now_s - last_beats[awaited_machine][1] > _EXIT_HEARTBEAT_TIMEOUT_S
                for awaited_machine in awaited_machines
            ):
                break
            time.sleep(0.02)
        return agreed_code(list(self._exit_codes().values()))

    def _exit_codes(self) -> dict[int, int]:
        """Return the exit codes of the machines that have published one."""
        exit_keys = {machine: _exit_key(machine) for machine in range(len(self.hosts))}
        exit_codes = {}
        for machine, exit_key in exit_keys.items():
            if self.store.check([exit_key]):
                exit_codes[machine] = int(self.store.get(exit_key))
        return exit_codes

    def publish_failures(self, failures: Sequence[Failure]) -> None:
        """Publish the failures of this machine's ranks."""
        self.store.set(
            self.key("failed", self.index),
            json.dumps([failure.encode() for failure in failures]),
        )

    def published_failures(self) -> list[Failure]:
        """Return the failures published by other machines."""
        failures: list[Failure] = []
        for machine in range(len(self.hosts)):
            failed_key = self.key("failed", machine)
            if machine != self.index and self.store.check([failed_key]):
                for encoded_failure in json.loads(self.store.get(failed_key)):
                    failures.append(Failure.decode(encoded_failure))
        return failures

    def collect_failures(self, timeout_s: float) -> list[Failure]:
        """Return the failures of all other machines, waiting up to `timeout_s` for machines that are still stopping."""
        deadline_s = time.monotonic() + timeout_s
        failed_keys = []
        for machine in range(len(self.hosts)):
            if machine != self.index:
                failed_keys.append(self.key("failed", machine))
        while time.monotonic() < deadline_s and not self.store.check(failed_keys):
            time.sleep(0.05)
        return self.published_failures()

    def silent_machines(self) -> list[str]:
        """Return the machines that have published neither a failure nor completion."""
        silent_machines = []
        for machine, host in enumerate(self.hosts):
            if (
                machine != self.index
                and not self.store.check([self.key("failed", machine)])
                and not self.store.check([self.key("done", machine)])
            ):
                silent_machines.append(f"machine {machine} ({host})")
        return silent_machines

    def all_done(self) -> bool:
        """Return whether every machine's ranks have finished."""
        return self.store.check(
            [self.key("done", machine) for machine in range(len(self.hosts))]
        )

    def num_waiting(self) -> int:
        """Return the number of machines that wait to restart the job."""
        return self.store.add(f"arrivals/{self.round + 1}", 0)

    def leave_job(self, timeout_s: float) -> None:
        """Leave the store; machine 0, which serves it, waits until the others have finished reading."""
        # shared by all rounds, like the exit codes
        gone_keys = [f"gone/{machine}" for machine in range(1, len(self.hosts))]
        if self.index != 0:
            self.store.set(f"gone/{self.index}", "1")
            return
        deadline_s = time.monotonic() + timeout_s
        while (
            gone_keys
            and time.monotonic() < deadline_s
            and not self.store.check(gone_keys)
        ):
            time.sleep(0.02)


def _exit_key(machine: int) -> str:
    """Return the key of a machine's exit code; shared by all rounds, because machines may end in different rounds."""
    return f"exit/{machine}"


def agreed_code(exit_codes: Sequence[int]) -> int:
    """Return the exit code of the job, given the machines' `codes`: failure first, then preemption, then success."""
    failure_codes = [code for code in exit_codes if code not in (0, PREEMPTED)]
    if failure_codes:
        return failure_codes[0]
    return PREEMPTED if PREEMPTED in exit_codes else 0


class PeerWatch:
    """Background thread that polls the other machines, because a store call blocks forever once the network is down."""

    def __init__(self, peers: Peers, lost: str) -> None:
        self._peers = peers
        self._lost = lost
        self._last_word = time.monotonic()
        self._problem: LaunchError | None = None
        self._waiting = 0
        self._finished = False
        self._all_done = False
        self._wake = threading.Event()
        self._stop = threading.Event()
        self._thread = threading.Thread(
            target=self._run, name="hasten-watch", daemon=True
        )
        self._thread.start()

    def num_waiting(self) -> int:
        """Return the number of machines that wait to restart, as of the last poll.

        Raises: PeerMachineFailed or MachineLost as found by the poll; MachineLost also if the poll itself does not return.
        """
        if self._problem is not None:
            raise self._problem
        silent_s = time.monotonic() - self._last_word
        if silent_s > _POLL_TIMEOUT_S:
            raise MachineLost(f"{self._lost} (no response for {silent_s:.0f} s)")
        return self._waiting

    def wait_done(self) -> None:
        """Wait until every machine's ranks have finished.

        Raises: as `waiting`.
        """
        self._finished = True
        self._wake.set()
        while not self._all_done:
            self.num_waiting()
            time.sleep(0.02)

    def close(self) -> None:
        """Stop polling; a thread that is stuck is abandoned until the process exits."""
        self._stop.set()
        self._wake.set()
        self._thread.join(_CLOSE_TIMEOUT_S)

    def _run(self) -> None:
        is_announced = False
        exit_codes: dict[int, int] = {}
        while not self._stop.is_set():
            try:
                self._peers.read_machines()
                if (new_codes := self._peers.ended_anywhere()) != exit_codes:
                    exit_codes = new_codes
                    launcher_files.write_ended(exit_codes, environment.snapshot())
                self._waiting = self._peers.num_waiting()
                if self._finished and not is_announced:
                    self._peers.store.set(
                        self._peers.key("done", self._peers.index), "1"
                    )
                    is_announced = True
                self._all_done = is_announced and self._peers.all_done()
            except LaunchError as error:
                self._problem = error
                return
            # torch's network errors; this file does not import torch
            except RuntimeError as error:
                self._problem = MachineLost(
                    f"{self._lost} ({str(error).strip().splitlines()[0][:200]})"
                )
                return
            self._last_word = time.monotonic()
            if self._all_done:
                return
            self._wake.wait(0.02 if self._finished else _POLL_INTERVAL_S)
            self._wake.clear()


def with_others(
    failures: Sequence[Failure], peers: Peers | None
) -> tuple[list[Failure], list[str]]:
    """Return the failures of all machines, and the machines that no longer respond."""
    if peers is None or len(peers.hosts) == 1:
        return list(failures), []
    known_ranks = {(failure.host, failure.rank) for failure in failures}
    remote_failures: list[Failure] = []
    if peers.index == 0:
        silent_machines: list[str] = []
    else:
        silent_machines = [f"machine 0 ({peers.hosts[0]})"]

    def exchange_failures() -> None:
        peers.publish_failures(
            [failure for failure in failures if failure.host == socket.gethostname()]
        )
        remote_failures.extend(
            failure
            for failure in peers.collect_failures(COLLECT_TIMEOUT_S)
            if (failure.host, failure.rank) not in known_ranks
        )
        silent_machines[:] = peers.silent_machines()

    # Machine 0 collects the others' failures while it waits; the others treat a late answer as no answer.
    run_within(
        (2 if peers.index == 0 else 1) * COLLECT_TIMEOUT_S + 1, exchange_failures
    )
    return [*failures, *remote_failures], silent_machines


def agreed_exit_code(peers: Peers | None, code: int, *, saving_s: float) -> int:
    """Return the exit code of the job after every machine knows it; `code` if the others do not respond.

    A machine whose ranks have saved waits up to `saving_s` for the others, which may still be saving.
    """
    if peers is None or len(peers.hosts) == 1:
        return code
    agreed_codes = [code]
    wait_s = saving_s if code == PREEMPTED else COLLECT_TIMEOUT_S

    def agree_on_code() -> None:
        agreed_codes[0] = peers.agree_on_code(code, wait_s)
        peers.leave_job(COLLECT_TIMEOUT_S)

    run_within(wait_s + COLLECT_TIMEOUT_S + 1, agree_on_code)
    return agreed_codes[0]


def run_within(seconds: float, talk: Callable[[], None]) -> None:
    """Run `talk` for at most `seconds`: a store call never returns once the network is down."""

    def run_block() -> None:
        # torch's network errors: machine 0 has exited; partial results count
        with contextlib.suppress(RuntimeError):
            talk()

    thread = threading.Thread(target=run_block, name="hasten-ending", daemon=True)
    thread.start()
    thread.join(seconds)
