"""Answers `hasten top` for a job of one process, which has no watchdog: one thread that sleeps until somebody asks."""

from __future__ import annotations

import threading
from typing import Final

from hasten.trust.stall.status_server import Desk

_TICK_S: Final = 1.0


class Reception:
    """The desk of a process that waits for nobody. `start` and `close` are called by the training thread."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="hasten-reception", daemon=True)

    def start(self) -> None:
        """Begin to answer."""
        self._desk.open()
        self._thread.start()

    def close(self, ended: str = "", failed: bool = False) -> None:
        """Stop answering; there is nobody to leave word for."""
        if self._over.is_set():
            return
        self._over.set()
        self._desk.ring()
        if threading.current_thread() is not self._thread:
            self._thread.join(2 * _TICK_S)
        self._desk.close()

    def _run(self) -> None:
        while not self._over.is_set():
            self._desk.wait(_TICK_S)
