"""Preemption: a signal that the machine will be reclaimed becomes a flag that all ranks agree on at a step boundary."""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, Final

import torch

from hasten.comm.base import Comm
from hasten.optim.clock import StepClock
from hasten.optim.loader_progress import LoaderCursor
from hasten.optim.run_part import RunPart

log = logging.getLogger(__name__)

PREEMPTED_EXIT_CODE: Final = 85
"""Exit code after the checkpoint of a preempted run: launchers and schedulers restart it, as nothing has failed."""

_STOP_SIGNALS: Final = ("SIGTERM", "SIGUSR1")


class Preemption(RunPart):
    """Listener for SIGTERM and SIGUSR1, installed at the first query; until then signals have their default effect.

    During the first window of the first loop they are held, because its query is still to come: a signal takes its default effect when
    the loop asks for the batch after that window, or ends, without a query.
    """

    def __init__(self, comm: Comm, clock: StepClock | None = None) -> None:
        self._comm = comm
        self._clock = clock
        self.decide: Callable[[], bool] | None = None
        """Returns whether to stop, in place of the ranks' agreement."""
        self._received: int | None = None
        self._agreed = False
        self._previous: dict[int, Any] = {}  # Any: any handler
        self._warned = False
        self._holds_signals = False

    @property
    def listening(self) -> bool:
        """True if the handlers are installed."""
        return bool(self._previous)

    def listen(self, signal_names: Iterable[str] = _STOP_SIGNALS) -> None:
        """Install the signal handlers; off the main thread, where Python forbids it, log once that signals are ignored.

        Ranks: each independently.
        """
        if self._previous and not self._holds_signals:
            return
        self._holds_signals = False
        if threading.current_thread() is not threading.main_thread():
            if not self._warned:
                log.warning(
                    "accelerator.preempted was asked for in the thread %r: Python gives signals to the main thread only, so SIGTERM and "
                    "SIGUSR1 are not noticed here and keep their default effect; read it once in the main thread first",
                    threading.current_thread().name,
                )
            self._warned = True
            return
        for signal_name in signal_names:
            signal_number = getattr(signal, signal_name, None)
            if signal_number is not None and signal_number not in self._previous:
                self._previous[int(signal_number)] = signal.signal(
                    signal_number, self._receive
                )

    def pass_begins(self, cursor: LoaderCursor) -> None:
        """Hold signals that have their default effect, until the first query or the end of the first window."""
        if self._previous or threading.current_thread() is not threading.main_thread():
            return
        for signal_name in _STOP_SIGNALS:
            signal_number = getattr(signal, signal_name, None)
            if signal_number is None:
                continue
            if signal.getsignal(signal_number) is signal.SIG_DFL:
                self._previous[int(signal_number)] = signal.signal(
                    signal_number, self._receive
                )
        self._holds_signals = True

    def batch(self, cursor: LoaderCursor) -> None:
        """End the first window, unless it is still open."""
        clock = self._clock
        if clock is None or clock.num_updates > 0 or clock.num_passes == 0:
            self.pass_ends(cursor)

    def pass_ends(self, cursor: LoaderCursor) -> None:
        """End the first window: signals have their default effect again, also one that was held, unless there was a query."""
        if self._clock is not None:
            self._clock.parts.forget(self, "pass_begins", "batch", "pass_ends")
        if self._holds_signals:
            self.end()
            if self._received is not None and self._received > 0:
                signal.raise_signal(self._received)

    def _receive(self, signal_number: int, frame: FrameType | None) -> None:
        is_repeated = self._received is not None
        self._received = signal_number
        # a loop that hangs in its first window can be ended
        if is_repeated and self._holds_signals:
            self.end()
            signal.raise_signal(signal_number)

    def set(self) -> None:
        """Request a stop without a signal. Ranks: any."""
        self._received = self._received or -1

    @property
    def received(self) -> int | None:
        """The signal this process received; None if it received none."""
        return self._received

    def agreed(self) -> bool:
        """Return True if any rank was asked to stop; stays True afterwards. Ranks: every rank, once per step."""
        self.listen()
        if self.decide is not None:
            return self.decide()
        if self._agreed:
            return True
        # Signal and rank in one number, so that the main process can log both and the others need not.
        comm = self._comm
        signal_word = 0
        if self._received is not None:
            signal_word = (self._received + 2) * comm.size + comm.rank
        if comm.size > 1:
            signal_word = int(
                comm.all_reduce(
                    torch.tensor([signal_word], dtype=torch.int32), "max"
                ).item()
            )
        if not signal_word:
            return False
        self._agreed = True
        if comm.rank == 0:
            shifted_signal, rank_position = divmod(signal_word, comm.size)
            log.warning(
                "%s; save and exit with code %d",
                stop_reason(shifted_signal - 2, comm.ranks[rank_position]),
                PREEMPTED_EXIT_CODE,
            )
        return True

    def end(self) -> None:
        """Restore the previous handlers."""
        self._holds_signals = False
        previous_handlers = self._previous
        self._previous = {}
        if threading.current_thread() is threading.main_thread():
            for signal_number, handler in previous_handlers.items():
                signal.signal(
                    signal_number, handler if handler is not None else signal.SIG_DFL
                )


class FinishFirst:
    """SIGTERM handler that finishes a save in flight before the default action."""

    def __init__(self, finish_save: Callable[[], None]) -> None:
        self._join = finish_save
        self._installed = False
        self._is_starting = False
        self._received: int | None = None

    @contextmanager
    def starting(self) -> Iterator[None]:
        """Install the handler in place of SIGTERM's default action, and defer the signal while the save is being started.

        A handler of the user or of Preemption stays.
        """
        self._is_starting = True
        is_main_thread = threading.current_thread() is threading.main_thread()
        if is_main_thread and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, self._receive)
            self._installed = True
        try:
            yield
        finally:
            self._is_starting = False
            if self._received is not None:
                self._finish(self._received)

    def _receive(self, signal_number: int, frame: FrameType | None) -> None:
        if self._is_starting:
            self._received = signal_number
        else:
            self._finish(signal_number)

    def _finish(self, signal_number: int) -> None:
        self._join()
        self.remove()
        signal.raise_signal(signal_number)

    def remove(self) -> None:
        """Restore the default action."""
        if self._installed and threading.current_thread() is threading.main_thread():
            self._installed = False
            if signal.getsignal(signal.SIGTERM) == self._receive:
                signal.signal(signal.SIGTERM, signal.SIG_DFL)


def stop_reason(received: int, rank: int) -> str:
    """Return a text that names the source of the stop request and the rank that received it."""
    return f"rank {rank} was told to stop by {'the program itself' if received < 0 else signal.Signals(received).name}"
