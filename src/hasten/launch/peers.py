"""What an agent knows of the other machines while the job runs: heartbeats, failures and who has finished."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from hasten.errors import LaunchError
from hasten.launch.checkin import Store
from hasten.launch.failure import PREEMPTED, Failure
from hasten.runtime import env as environment
from hasten.runtime import launcher_files

_SILENCE_S: Final = 60.0
_SUSPECT_S: Final = 15.0
_NO_ANSWER_S: Final = 25.0
_LOOK_EVERY_S: Final = 1.0
_LOST_S: Final = 10.0
_STOPPING: Final = "stopping"
_CLOSE_S: Final = 0.5  # the thread is a daemon: one that is stuck in a dead connection is left behind


class PeerMachineFailed(LaunchError):
    """Another machine gave up; its failures say why."""

    def __init__(self, message: str, failures: Sequence[Failure] = (), code: int = 1) -> None:
        super().__init__(message)
        self.failures = tuple(failures)
        self.code = code


class MachineLost(LaunchError):
    """Another machine does not answer any more; it may come back."""


@dataclass(slots=True)
class Peers:
    """The machines of one round, this one at `index`."""

    store: Store
    index: int
    hosts: tuple[str, ...]
    round: int
    _beat: int = 0
    suspects: tuple[str, ...] = ()
    """Hosts that have been silent for some seconds, as of the last look."""
    ended: dict[int, int] = field(default_factory=dict)
    """Exit codes of the ranks of this machine that have ended; copies of this object share it."""
    _heard: dict[int, tuple[str, float]] = field(default_factory=dict)

    def _key(self, what: str, machine: int) -> str:
        return f"peers/{self.round}/{what}/{machine}"

    def look(self) -> None:
        """Tell the others that this machine lives, and hear what became of them.

        Raises: PeerMachineFailed if one gave up; MachineLost if one has been silent for a minute.
        """
        self._beat += 1
        self.store.set(self._key("beat", self.index), str(self._beat))
        if failures := self.published():
            raise PeerMachineFailed(f"machine {failures[0].host} failed", failures)
        self._hear_of_ends()
        now, suspects = time.monotonic(), []
        for machine, host in enumerate(self.hosts):
            if machine == self.index:
                continue
            key = self._key("beat", machine)
            beat = self.store.get(key).decode() if self.store.check([key]) else ""
            known, since = self._heard.setdefault(machine, (beat, now))
            if beat != known:
                self._heard[machine] = (beat, now)
            elif now - since > _SUSPECT_S and not self.store.check([self._key("done", machine)]):
                suspects.append(host)
                if now - since < _SILENCE_S:
                    continue
                raise MachineLost(
                    f"machine {machine} ({host}) has been silent for {_SILENCE_S:g} s: it is down, or the network to it is. "
                    f"The job cannot go on without it; look there, then start again."
                )

        self.suspects = tuple(suspects)

    def ended_anywhere(self) -> dict[int, int]:
        """Tell the other machines which ranks of this one have ended; the exit codes of those of all machines."""
        found = dict(self.ended)
        self.store.set(self._key("ended", self.index), json.dumps(list(found.items())))
        for machine in range(len(self.hosts)):
            key = self._key("ended", machine)
            if machine != self.index and self.store.check([key]):
                found.update({int(rank): int(code) for rank, code in json.loads(self.store.get(key))})
        return found

    def _hear_of_ends(self) -> None:
        for machine, code in self._codes().items():
            if machine != self.index and code not in (0, PREEMPTED):
                raise PeerMachineFailed(
                    f"machine {machine} ({self.hosts[machine]}) was stopped (exit code {code}), and the job cannot go on "
                    f"without it. Look at its output.",
                    code=code,
                )

    def say_stopping(self) -> None:
        """Tell the others that a signal told this machine to stop: they do not start the job again by themselves."""
        self.store.set(_STOPPING, str(self.index))

    def stopping(self) -> bool:
        """Return whether a machine was told to stop by a signal."""
        return self.store.check([_STOPPING])

    def agree(self, code: int, timeout_s: float) -> int:
        """Return the exit code of the job, when every machine has said how it ended.

        Machines that say nothing for `timeout_s`, or whose heartbeat stops, are not waited for.
        """
        self.store.set(_exit_key(self.index), str(code))
        deadline, beats = time.monotonic() + timeout_s, dict.fromkeys(range(len(self.hosts)), ("", time.monotonic()))
        while waited := [m for m in range(len(self.hosts)) if not self.store.check([_exit_key(m)])]:
            now = time.monotonic()
            for machine in waited:
                key = self._key("beat", machine)
                beat = self.store.get(key).decode() if self.store.check([key]) else ""
                if beat != beats[machine][0]:
                    beats[machine] = (beat, now)
            if now > deadline or all(now - beats[m][1] > _LOST_S for m in waited):
                break
            time.sleep(0.02)
        return agreed_code(list(self._codes().values()))

    def _codes(self) -> dict[int, int]:
        """Return the exit codes of the machines that have said theirs."""
        keys = {m: _exit_key(m) for m in range(len(self.hosts))}
        return {m: int(self.store.get(key)) for m, key in keys.items() if self.store.check([key])}

    def publish(self, failures: Sequence[Failure]) -> None:
        """Tell the others how this machine's ranks failed."""
        self.store.set(self._key("failed", self.index), json.dumps([f.encode() for f in failures]))

    def published(self) -> list[Failure]:
        """Return the failures that other machines have told."""
        found: list[Failure] = []
        for machine in range(len(self.hosts)):
            key = self._key("failed", machine)
            if machine != self.index and self.store.check([key]):
                found += [Failure.decode(item) for item in json.loads(self.store.get(key))]
        return found

    def collect(self, timeout_s: float) -> list[Failure]:
        """Return the failures of all other machines, waiting a moment for those that are still stopping."""
        deadline = time.monotonic() + timeout_s
        keys = [self._key("failed", m) for m in range(len(self.hosts)) if m != self.index]
        while time.monotonic() < deadline and not self.store.check(keys):
            time.sleep(0.05)
        return self.published()

    def silent(self) -> list[str]:
        """Machines that neither failed in words nor finished."""
        return [
            f"machine {m} ({host})"
            for m, host in enumerate(self.hosts)
            if m != self.index
            and not self.store.check([self._key("failed", m)])
            and not self.store.check([self._key("done", m)])
        ]

    def say_done(self) -> None:
        """Tell the others that this machine's ranks have finished."""
        self.store.set(self._key("done", self.index), "1")

    def all_done(self) -> bool:
        """Return whether every machine's ranks have finished."""
        return self.store.check([self._key("done", m) for m in range(len(self.hosts))])

    def waiting(self) -> int:
        """Machines that want to start the job again."""
        return self.store.add(f"arrivals/{self.round + 1}", 0)

    def leave(self, timeout_s: float) -> None:
        """Machine 0 serves the store: let the others read to the end before it goes."""
        gone = [f"gone/{m}" for m in range(1, len(self.hosts))]  # the same in every round, as the exit codes
        if self.index != 0:
            self.store.set(f"gone/{self.index}", "1")
            return
        deadline = time.monotonic() + timeout_s
        while gone and time.monotonic() < deadline and not self.store.check(gone):
            time.sleep(0.02)


def _exit_key(machine: int) -> str:
    """Return where a machine says its exit code; the same in every round, because machines may end in different ones."""
    return f"exit/{machine}"


def agreed_code(codes: Sequence[int]) -> int:
    """The exit code of a job whose machines ended with `codes`: a failure counts more than a stop, a stop more than success."""
    failed = [code for code in codes if code not in (0, PREEMPTED)]
    if failed:
        return failed[0]
    return PREEMPTED if PREEMPTED in codes else 0


class Watch:
    """Looks after the other machines in a thread of its own, because a store whose network is gone blocks forever."""

    def __init__(self, peers: Peers, lost: str) -> None:
        self._peers = peers
        self._lost = lost
        self._last_word = time.monotonic()
        self._problem: LaunchError | None = None
        self._waiting = 0
        self._finished = False
        self._all_done = False
        self._wake, self._stop = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="hasten-watch", daemon=True)
        self._thread.start()

    def waiting(self) -> int:
        """Machines that want to start again, as of the last look.

        Raises: PeerMachineFailed for what the look found; MachineLost for that, too, or if the look itself does not come back.
        """
        if self._problem is not None:
            raise self._problem
        silent = time.monotonic() - self._last_word
        if silent > _NO_ANSWER_S:
            raise MachineLost(f"{self._lost} (no answer for {silent:.0f} s)")
        return self._waiting

    def wait_done(self) -> None:
        """Return when every machine's ranks have finished.

        Raises: as `waiting`.
        """
        self._finished = True
        self._wake.set()
        while not self._all_done:
            self.waiting()
            time.sleep(0.02)

    def close(self) -> None:
        """Stop looking; a thread that is stuck is left to the end of the process."""
        self._stop.set()
        self._wake.set()
        self._thread.join(_CLOSE_S)

    def _run(self) -> None:
        told = False
        suspects: tuple[str, ...] = ()
        ended: dict[int, int] = {}
        while not self._stop.is_set():
            try:
                self._peers.look()
                if (codes := self._peers.ended_anywhere()) != ended:
                    ended = codes
                    launcher_files.write_ended(ended, environment.snapshot())
                if self._peers.suspects != suspects:
                    suspects = self._peers.suspects
                    launcher_files.write_silent(suspects, environment.snapshot())
                self._waiting = self._peers.waiting()
                if self._finished and not told:
                    self._peers.say_done()
                    told = True
                self._all_done = told and self._peers.all_done()
            except LaunchError as error:
                self._problem = error
                return
            except RuntimeError as error:  # torch's network errors; this file does without torch
                self._problem = MachineLost(f"{self._lost} ({str(error).strip().splitlines()[0][:200]})")
                return
            self._last_word = time.monotonic()
            if self._all_done:
                return
            self._wake.wait(0.02 if self._finished else _LOOK_EVERY_S)
            self._wake.clear()
