"""Saving in the background: one save in flight, its failure raised at the next save, wait or close."""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from hasten.checkpoint.base import Blob
from hasten.checkpoint.staging import Staging
from hasten.checkpoint.writer import Outcome
from hasten.comm.base import Comm

log = logging.getLogger(__name__)


class AsyncWriter:
    """One background thread at a time, talking to other ranks over a group of its own.

    The thread is not a daemon: the interpreter waits for it at exit, so a save that has begun is finished.
    """

    def __init__(self, comm: Comm) -> None:
        self._world = comm
        self._comm: Comm | None = None
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._outcome: Outcome | None = None
        self._registered = False
        self._reserving: threading.Thread | None = None
        self.staging = Staging()

    @property
    def comm(self) -> Comm:
        """The group of the background thread. Ranks: every rank, the first time."""
        if self._comm is None:
            self._comm = self._world.twin()
        return self._comm

    @property
    def busy(self) -> bool:
        """Whether a save is being written now."""
        return self._thread is not None and self._thread.is_alive()

    def reserve(self, num_bytes: int, device: torch.device | None) -> None:
        """Take the memory for the first save now, in the background: page-locked memory is slow to get."""
        self.wait_for_memory()
        self._reserving = threading.Thread(target=self.staging.reserve, args=(num_bytes, device), name="hasten-reserve")
        self._reserving.start()

    def wait_for_memory(self) -> None:
        """Return when memory that is being taken is there."""
        thread, self._reserving = self._reserving, None
        if thread is not None:
            thread.join()

    def begin(self, tensors: Sequence[Tensor]) -> None:
        """Start to copy what will be written to the host."""
        self.wait_for_memory()
        self.staging.begin(tensors)

    def stage(self, blobs: Mapping[str, Blob]) -> dict[str, Blob]:
        """The same files with every tensor copied to the host; training may go on when this returns."""
        return self.staging.end(blobs)

    def submit(self, work: Callable[[], Outcome], name: str) -> None:
        """Run `work` in the background, after the save before it has ended (back-pressure).

        Raises: the error of the save before it.
        """
        self.wait()

        def run() -> None:
            try:
                self._outcome = work()
            except BaseException as error:  # handed to the training thread at its next save, wait or close
                self._error = error
                log.error("saving %s in the background failed: %s", name, error)

        self._finish_before_exit()
        self._thread = threading.Thread(target=run, name=f"hasten-save-{name}", daemon=False)
        self._thread.start()

    def _finish_before_exit(self) -> None:
        """Join the thread before Python forbids new ones: at exit, thread pools close before threads are waited for."""
        if self._registered:
            return
        self._registered = True
        writer = weakref.ref(self)

        def join() -> None:
            if (still := writer()) is not None and still._thread is not None:
                still._thread.join()

        # Called in reverse order, so before the one with which concurrent.futures closes its pools. Private in Python,
        # with no public equivalent: atexit comes too late.
        register = getattr(threading, "_register_atexit", None)
        if register is not None:
            register(join)

    def wait(self) -> Outcome | None:
        """Return what the save in flight came to, when it has ended.

        Raises: its error, once.
        """
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.join()
        error, self._error = self._error, None
        outcome, self._outcome = self._outcome, None
        if error is not None:
            raise error
        return outcome

    def close(self) -> None:
        """Wait for the save in flight and give its memory back. Raises: its error."""
        try:
            self.wait()
        finally:
            self.wait_for_memory()
            self.staging.release()
