"""Signal guard that kills workers and launcher on Ctrl-C and SIGTERM, even if the main thread is in native code."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterable
from types import FrameType, TracebackType
from typing import Final, Self

SAVING: Final = (signal.SIGTERM, signal.SIGUSR1)
"""Signals after which a program may save before it exits; schedulers send either of them."""
STOPPING: Final = (signal.SIGINT, signal.SIGHUP, *SAVING)
"""Signals that end a job; the launcher forwards them to its processes."""


class Interrupted(Exception):
    """Raised when a signal stops the launcher before its processes were started."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


class SignalGuard:
    """Thread that watches for signals; a second signal, or `grace_s` after the first, kills all processes.

    With `saving_grace_s`, processes may save after SIGTERM or SIGUSR1, and repeated SIGTERM or SIGUSR1 do not interrupt the save.

    A main thread blocked in a native call (a store whose network is down) runs no Python signal handler. The C-level handler
    still writes the signal number into a pipe, which this thread reads.
    """

    def __init__(
        self,
        groups: Callable[[], Iterable[int]],
        *,
        grace_s: float,
        last_words: Callable[[str], None],
        saving_grace_s: float | None = None,
    ) -> None:
        self._groups = groups
        self._grace_s = grace_s
        self._lets_save = saving_grace_s is not None
        if saving_grace_s is None:
            self._saving_grace_s = grace_s
        else:
            self._saving_grace_s = saving_grace_s
        self._last_words = last_words
        self._first_signal: tuple[int, float] | None = None
        self._ended = threading.Event()
        self._read, self._write = os.pipe()
        self._thread = threading.Thread(
            target=self._watch, name="hasten-signal-guard", daemon=True
        )
        self._old_fd = -1
        self._old_handlers: dict[int, object] = {}
        self._has_code = False

    def __enter__(self) -> Self:
        os.set_blocking(self._read, False)
        os.set_blocking(self._write, False)
        self._old_handlers = {
            number: signal.signal(number, self._raise_interrupted)
            for number in STOPPING
        }
        self._old_fd = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._ended.set()
        signal.set_wakeup_fd(self._old_fd)
        for number, handler in self._old_handlers.items():
            if not self._has_code:
                signal.signal(number, handler)  # type: ignore[arg-type]  # what signal.signal returned
        self._thread.join()
        os.close(self._read)
        os.close(self._write)

    def hold_signals(self) -> None:
        """Ignore further SIGTERM and SIGUSR1: schedulers send them repeatedly, and a save must not be interrupted."""
        for number in SAVING:
            signal.signal(number, signal.SIG_IGN)

    def settle_exit(self, code: int) -> None:
        """Fix `code` as this process's exit code: SIGTERM is ignored, and Ctrl-C exits immediately with it.

        The handlers remain installed for the rest of the process, because the other machines rely on the code.
        """
        self._has_code = True
        self._ended.set()
        self.hold_signals()
        for number in (signal.SIGINT, signal.SIGHUP):
            signal.signal(number, lambda number, frame: os._exit(code))

    @staticmethod
    def _raise_interrupted(number: int, frame: FrameType | None) -> None:
        raise Interrupted(number)

    def _watch(self) -> None:
        while not self._ended.wait(0.1):
            for number in self._read_signals():
                if self._first_signal is None:
                    self._first_signal = (number, time.monotonic())
                elif not (
                    self._lets_save
                    and number in SAVING
                    and self._first_signal[0] in SAVING
                ):
                    self._end(number, "a second signal")
            if self._first_signal is not None:
                number, first_signal_s = self._first_signal
                if number in SAVING:
                    grace_s = self._saving_grace_s
                else:
                    grace_s = self._grace_s
                grace_s = grace_s if list(self._groups()) else 2.0
                if time.monotonic() - first_signal_s > grace_s:
                    self._end(number, f"no process ended within {grace_s:g} s")

    def _read_signals(self) -> list[int]:
        try:
            return [number for number in os.read(self._read, 64) if number in STOPPING]
        except BlockingIOError:
            return []

    def _end(self, number: int, reason: str) -> None:
        self._last_words(
            f"{signal.Signals(number).name}, {reason}: all processes are killed now"
        )
        kill_groups(self._groups())
        os._exit(128 + number)


def kill_groups(groups: Iterable[int]) -> None:
    """Kill process groups with SIGKILL; groups that no longer exist are skipped."""
    for group in groups:
        try:
            os.killpg(group, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):  # already exited
            continue
