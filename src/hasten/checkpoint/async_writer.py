"""Saving in the background: one save in flight, its failure raised at the next save, wait or close."""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from hasten.checkpoint.base import Blob
from hasten.checkpoint.rank_agreement import agreeing
from hasten.checkpoint.staging import Staging
from hasten.checkpoint.writer import Outcome
from hasten.comm.base import Comm

log = logging.getLogger(__name__)


class AsyncWriter:
    """One background thread at a time, talking to other ranks over a group of its own.

    The thread is not a daemon: the interpreter waits for it at exit, so a save that has begun is finished.
    """

    def __init__(self) -> None:
        self.comm: Comm | None = None
        """The group of the background thread, which the ranks make together when they first need it."""
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._outcome: Outcome | None = None
        self._go: threading.Event | None = None
        self._cancelled = False
        self._registered = False
        self._reserving: threading.Thread | None = None
        self.staging = Staging()

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

    def submit(self, work: Callable[[], Outcome], name: str) -> threading.Event:
        """Start a thread that runs `work` as soon as the returned event is set, or `cancel` is called.

        Between the two, ranks can make sure that every one of them has its thread.
        Raises: the error of the save before it.
        """
        self.wait()
        comm, go = self.comm, threading.Event()
        assert comm is not None, "the ranks have made a group for the thread"
        self._cancelled = False

        def run() -> None:
            go.wait()
            if self._cancelled:
                return
            try:
                with agreeing(comm, f"saving {name!r} in the background"):
                    self._outcome = work()
            except BaseException as error:  # handed to the training thread at its next save, wait or close
                self._error = error
                log.error("saving %s in the background failed: %s", name, error)

        self._finish_before_exit()
        self._thread = threading.Thread(target=run, name=f"hasten-save-{name}", daemon=False)
        self._go = go
        self._thread.start()
        return go

    def cancel(self) -> None:
        """End the thread that waits for its event, if there is one."""
        self._cancelled = True
        if self._go is not None:
            self._go.set()
        thread, self._thread = self._thread, None
        if thread is not None and thread.ident is not None:
            thread.join()

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
