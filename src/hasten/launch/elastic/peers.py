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

COLLECT_S: Final = 3.0
_SILENCE_S: Final = 60.0
_NO_ANSWER_S: Final = 25.0
_LOOK_EVERY_S: Final = 1.0
_LOST_S: Final = 10.0
_STOPPING: Final = "stopping"
# the thread is a daemon: one that is stuck in a dead connection is abandoned
_CLOSE_S: Final = 0.5


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
    _heard: dict[int, tuple[str, float]] = field(default_factory=dict)

    def key(self, topic: str, machine: int) -> str:
        """Return the key of what a machine publishes in this round."""
        return f"peers/{self.round}/{topic}/{machine}"

    def look(self) -> None:
        """Send this machine's heartbeat, and check the heartbeats and failures of the others.

        Raises: PeerMachineFailed if a machine failed; MachineLost if a machine has been silent for a minute.
        """
        self._beat += 1
        self.store.set(self.key("beat", self.index), str(self._beat))
        if failures := self.published():
            raise PeerMachineFailed(f"machine {failures[0].host} failed", failures)
        self._hear_of_ends()
        now_s = time.monotonic()
        for machine, host in enumerate(self.hosts):
            if machine == self.index:
                continue
            key = self.key("beat", machine)
            beat = self.store.get(key).decode() if self.store.check([key]) else ""
            last_beat, since_s = self._heard.setdefault(machine, (beat, now_s))
            if beat != last_beat:
                self._heard[machine] = (beat, now_s)
            elif now_s - since_s > _SILENCE_S and not self.store.check(
                [self.key("done", machine)]
            ):
                raise MachineLost(
                    f"machine {machine} ({host}) has not responded for {_SILENCE_S:g} s: it is down, or the network to it is. The job "
                    "cannot continue without it; check the machine, then restart the job."
                )

    def ended_anywhere(self) -> dict[int, int]:
        """Publish this machine's ended ranks, and return the exit codes of ended ranks on all machines."""
        exit_codes = dict(self.ended)
        self.store.set(
            self.key("ended", self.index), json.dumps(list(exit_codes.items()))
        )
        for machine in range(len(self.hosts)):
            key = self.key("ended", machine)
            if machine != self.index and self.store.check([key]):
                exit_codes.update(
                    {
                        int(rank): int(code)
                        for rank, code in json.loads(self.store.get(key))
                    }
                )
        return exit_codes

    def _hear_of_ends(self) -> None:
        for machine, code in self._codes().items():
            if machine != self.index and code not in (0, PREEMPTED):
                raise PeerMachineFailed(
                    f"machine {machine} ({self.hosts[machine]}) was stopped (exit code {code}), and the job cannot continue without it. "
                    "Check its output.",
                    code=code,
                )

    def say_stopping(self) -> None:
        """Publish that this machine received a stop signal, so that the others do not restart the job."""
        self.store.set(_STOPPING, str(self.index))

    def stopping(self) -> bool:
        """Return whether any machine received a stop signal."""
        return self.store.check([_STOPPING])

    def agree(self, code: int, timeout_s: float) -> int:
        """Return the exit code of the job, once every machine has published its exit code.

        Machines that publish nothing for `timeout_s`, or whose heartbeat stops, are not waited for.
        """
        self.store.set(_exit_key(self.index), str(code))
        deadline, beats = (
            time.monotonic() + timeout_s,
            dict.fromkeys(range(len(self.hosts)), ("", time.monotonic())),
        )
        while waited := [
            m for m in range(len(self.hosts)) if not self.store.check([_exit_key(m)])
        ]:
            now_s = time.monotonic()
            for machine in waited:
                key = self.key("beat", machine)
                beat = self.store.get(key).decode() if self.store.check([key]) else ""
                if beat != beats[machine][0]:
                    beats[machine] = (beat, now_s)
            if now_s > deadline or all(now_s - beats[m][1] > _LOST_S for m in waited):
                break
            time.sleep(0.02)
        return agreed_code(list(self._codes().values()))

    def _codes(self) -> dict[int, int]:
        """Return the exit codes of the machines that have published one."""
        keys = {m: _exit_key(m) for m in range(len(self.hosts))}
        return {
            m: int(self.store.get(key))
            for m, key in keys.items()
            if self.store.check([key])
        }

    def publish(self, failures: Sequence[Failure]) -> None:
        """Publish the failures of this machine's ranks."""
        self.store.set(
            self.key("failed", self.index), json.dumps([f.encode() for f in failures])
        )

    def published(self) -> list[Failure]:
        """Return the failures published by other machines."""
        failures: list[Failure] = []
        for machine in range(len(self.hosts)):
            key = self.key("failed", machine)
            if machine != self.index and self.store.check([key]):
                failures += [
                    Failure.decode(item) for item in json.loads(self.store.get(key))
                ]
        return failures

    def collect(self, timeout_s: float) -> list[Failure]:
        """Return the failures of all other machines, waiting up to `timeout_s` for machines that are still stopping."""
        deadline = time.monotonic() + timeout_s
        keys = [
            self.key("failed", m) for m in range(len(self.hosts)) if m != self.index
        ]
        while time.monotonic() < deadline and not self.store.check(keys):
            time.sleep(0.05)
        return self.published()

    def silent(self) -> list[str]:
        """Return the machines that have published neither a failure nor completion."""
        return [
            f"machine {m} ({host})"
            for m, host in enumerate(self.hosts)
            if m != self.index
            and not self.store.check([self.key("failed", m)])
            and not self.store.check([self.key("done", m)])
        ]

    def all_done(self) -> bool:
        """Return whether every machine's ranks have finished."""
        return self.store.check([self.key("done", m) for m in range(len(self.hosts))])

    def waiting(self) -> int:
        """Return the number of machines that wait to restart the job."""
        return self.store.add(f"arrivals/{self.round + 1}", 0)

    def leave(self, timeout_s: float) -> None:
        """Leave the store; machine 0, which serves it, waits until the others have finished reading."""
        # shared by all rounds, like the exit codes
        gone = [f"gone/{m}" for m in range(1, len(self.hosts))]
        if self.index != 0:
            self.store.set(f"gone/{self.index}", "1")
            return
        deadline = time.monotonic() + timeout_s
        while gone and time.monotonic() < deadline and not self.store.check(gone):
            time.sleep(0.02)


def _exit_key(machine: int) -> str:
    """Return the key of a machine's exit code; shared by all rounds, because machines may end in different rounds."""
    return f"exit/{machine}"


def agreed_code(codes: Sequence[int]) -> int:
    """Return the exit code of the job, given the machines' `codes`: failure first, then preemption, then success."""
    failed = [code for code in codes if code not in (0, PREEMPTED)]
    if failed:
        return failed[0]
    return PREEMPTED if PREEMPTED in codes else 0


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
        self._wake, self._stop = threading.Event(), threading.Event()
        self._thread = threading.Thread(
            target=self._run, name="hasten-watch", daemon=True
        )
        self._thread.start()

    def waiting(self) -> int:
        """Return the number of machines that wait to restart, as of the last poll.

        Raises: PeerMachineFailed or MachineLost as found by the poll; MachineLost also if the poll itself does not return.
        """
        if self._problem is not None:
            raise self._problem
        silent = time.monotonic() - self._last_word
        if silent > _NO_ANSWER_S:
            raise MachineLost(f"{self._lost} (no response for {silent:.0f} s)")
        return self._waiting

    def wait_done(self) -> None:
        """Wait until every machine's ranks have finished.

        Raises: as `waiting`.
        """
        self._finished = True
        self._wake.set()
        while not self._all_done:
            self.waiting()
            time.sleep(0.02)

    def close(self) -> None:
        """Stop polling; a thread that is stuck is abandoned until the process exits."""
        self._stop.set()
        self._wake.set()
        self._thread.join(_CLOSE_S)

    def _run(self) -> None:
        announced = False
        ended: dict[int, int] = {}
        while not self._stop.is_set():
            try:
                self._peers.look()
                if (codes := self._peers.ended_anywhere()) != ended:
                    ended = codes
                    launcher_files.write_ended(ended, environment.snapshot())
                self._waiting = self._peers.waiting()
                if self._finished and not announced:
                    self._peers.store.set(
                        self._peers.key("done", self._peers.index), "1"
                    )
                    announced = True
                self._all_done = announced and self._peers.all_done()
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
            self._wake.wait(0.02 if self._finished else _LOOK_EVERY_S)
            self._wake.clear()


def with_others(
    failures: Sequence[Failure], peers: Peers | None
) -> tuple[list[Failure], list[str]]:
    """Return the failures of all machines, and the machines that no longer respond."""
    if peers is None or len(peers.hosts) == 1:
        return list(failures), []
    known_ranks = {(f.host, f.rank) for f in failures}
    remote_failures: list[Failure] = []
    silent: list[str] = [] if peers.index == 0 else [f"machine 0 ({peers.hosts[0]})"]

    def exchange() -> None:
        peers.publish([f for f in failures if f.host == socket.gethostname()])
        remote_failures.extend(
            f for f in peers.collect(COLLECT_S) if (f.host, f.rank) not in known_ranks
        )
        silent[:] = peers.silent()

    # Machine 0 collects the others' failures while it waits; the others treat a late answer as no answer.
    within((2 if peers.index == 0 else 1) * COLLECT_S + 1, exchange)
    return [*failures, *remote_failures], silent


def agreed_exit_code(peers: Peers | None, code: int, *, saving_s: float) -> int:
    """Return the exit code of the job after every machine knows it; `code` if the others do not respond.

    A machine whose ranks have saved waits up to `saving_s` for the others, which may still be saving.
    """
    if peers is None or len(peers.hosts) == 1:
        return code
    agreed = [code]
    wait_s = saving_s if code == PREEMPTED else COLLECT_S

    def agree() -> None:
        agreed[0] = peers.agree(code, wait_s)
        peers.leave(COLLECT_S)

    within(wait_s + COLLECT_S + 1, agree)
    return agreed[0]


def within(seconds: float, talk: Callable[[], None]) -> None:
    """Run `talk` for at most `seconds`: a store call never returns once the network is down."""

    def run() -> None:
        # torch's network errors: machine 0 has exited; partial results count
        with contextlib.suppress(RuntimeError):
            talk()

    thread = threading.Thread(target=run, name="hasten-ending", daemon=True)
    thread.start()
    thread.join(seconds)
