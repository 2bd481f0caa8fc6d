"""Ending a job that has stalled: last words for the launcher, stopped ranks of this machine killed, then this process."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Final

from hasten.errors import StallError
from hasten.runtime import env, last_words
from hasten.trust.divergence.state import Note
from hasten.trust.stall import processes

STALLED: Final = 86
"""The exit code of a job that was ended because its ranks waited for each other."""
_FLUSH_S: Final = 1.0


def end_process(summary: str, others: Iterable[Note] = ()) -> None:
    """End this process with the reason, after those of `others` that are stopped.

    The training thread may be blocked in native code, so nothing is unwound.
    """
    if path := env.snapshot().get(last_words.ERROR_FILE):
        with suppress(OSError):  # the disk may be what stalled; the exit code still tells
            last_words.write(Path(path), f"{StallError.__name__}: {summary}", "")
    flushing = threading.Thread(target=_flush, daemon=True)  # the blocked thread may hold a stream's lock
    flushing.start()
    flushing.join(_FLUSH_S)
    _kill_stopped(others)
    os._exit(STALLED)


def _kill_stopped(notes: Iterable[Note]) -> None:
    """Kill those of these processes that are stopped: they would outlive the job, since they act on no other signal."""
    for note in notes:
        if processes.status_of(note.pid, note.started) == "stopped":
            with suppress(ProcessLookupError, PermissionError):  # it ended meanwhile, or is another user's
                os.kill(note.pid, signal.SIGKILL)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):  # closed or missing: there is nothing to save
            stream.flush()
