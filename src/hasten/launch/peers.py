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
from hasten.launch.failure import Failure

_SILENCE_S: Final = 60.0
_NO_ANSWER_S: Final = 30.0
_LOOK_EVERY_S: Final = 1.0
_CLOSE_S: Final = 0.5  # the thread is a daemon: one that is stuck in a dead connection is left behind


class PeerMachineFailed(LaunchError):
    """Another machine gave up; its failures say why."""

    def __init__(self, message: str, failures: Sequence[Failure] = ()) -> None:
        super().__init__(message)
        self.failures = tuple(failures)


@dataclass(slots=True)
class Peers:
    """The machines of one round, this one at `index`."""

    store: Store
    index: int
    hosts: tuple[str, ...]
    round: int
    _beat: int = 0
    _heard: dict[int, tuple[str, float]] = field(default_factory=dict)

    def _key(self, what: str, machine: int) -> str:
        return f"peers/{self.round}/{what}/{machine}"

    def look(self) -> None:
        """Tell the others that this machine lives, and hear what became of them.

        Raises: PeerMachineFailed if one gave up; LaunchError if one has been silent for a minute.
        """
        self._beat += 1
        self.store.set(self._key("beat", self.index), str(self._beat))
        if failures := self.published():
            raise PeerMachineFailed(f"machine {failures[0].host} failed", failures)
        now = time.monotonic()
        for machine, host in enumerate(self.hosts):
            if machine == self.index:
                continue
            key = self._key("beat", machine)
            beat = self.store.get(key).decode() if self.store.check([key]) else ""
            known, since = self._heard.setdefault(machine, (beat, now))
            if beat != known:
                self._heard[machine] = (beat, now)
            elif now - since > _SILENCE_S and not self.store.check([self._key("done", machine)]):
                raise LaunchError(
                    f"machine {machine} ({host}) has been silent for {_SILENCE_S:g} s: it is down, or the network to it is. "
                    f"The job cannot go on without it; look there, then start again."
                )

    def publish(self, failures: Sequence[Failure]) -> None:
        """Tell the others how this machine's ranks failed."""
        self.store.set(self._key("failed", self.index), json.dumps([f.encode() for f in failures]))

    def published(self) -> list[Failure]:
        """The failures that other machines have told."""
        found: list[Failure] = []
        for machine in range(len(self.hosts)):
            key = self._key("failed", machine)
            if machine != self.index and self.store.check([key]):
                found += [Failure.decode(item) for item in json.loads(self.store.get(key))]
        return found

    def collect(self, timeout_s: float) -> list[Failure]:
        """The failures of all other machines, waiting a moment for those that are still stopping."""
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
        """Whether every machine's ranks have finished."""
        return self.store.check([self._key("done", m) for m in range(len(self.hosts))])

    def waiting(self) -> int:
        """Machines that want to start the job again."""
        return self.store.add(f"arrivals/{self.round + 1}", 0)

    def leave(self, timeout_s: float) -> None:
        """Machine 0 serves the store: let the others read to the end before it goes."""
        gone = [self._key("gone", m) for m in range(1, len(self.hosts))]
        if self.index != 0:
            self.store.set(self._key("gone", self.index), "1")
            return
        deadline = time.monotonic() + timeout_s
        while gone and time.monotonic() < deadline and not self.store.check(gone):
            time.sleep(0.02)


class Watch:
    """Looks after the other machines in a thread of its own, because a store whose network is gone blocks for ever."""

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

        Raises: PeerMachineFailed or LaunchError for what the look found, or if the look itself does not come back.
        """
        if self._problem is not None:
            raise self._problem
        silent = time.monotonic() - self._last_word
        if silent > _NO_ANSWER_S:
            raise LaunchError(f"{self._lost} (no answer for {silent:.0f} s)")
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
        while not self._stop.is_set():
            try:
                self._peers.look()
                self._waiting = self._peers.waiting()
                if self._finished and not told:
                    self._peers.say_done()
                    told = True
                self._all_done = told and self._peers.all_done()
            except LaunchError as error:
                self._problem = error
                return
            except RuntimeError as error:  # torch's network errors; this file does without torch
                self._problem = LaunchError(f"{self._lost} ({str(error).strip().splitlines()[0][:200]})")
                return
            self._last_word = time.monotonic()
            if self._all_done:
                return
            self._wake.wait(0.02 if self._finished else _LOOK_EVERY_S)
            self._wake.clear()
