"""A line in the terminal while the training waits for one long operation, such as the compilation of a model."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final, TextIO

_NEW_LINE: Final = "\n"
_REDRAW: Final = "\r\x1b[2K"
_BACK: Final = "\r\x1b[2K\x1b[1A"
"""Erase the line and go up to the line before it, where a progress bar redraws itself."""


@contextmanager
def waiting_line(
    text: Callable[[float], str],
    stream: TextIO | None = None,
    *,
    after_s: float = 1.0,
    every_s: float = 0.5,
) -> Iterator[None]:
    """Context manager that shows `text(seconds)` under the output so far, redrawn by a thread, and erases it at the end.

    The line appears after `after_s` seconds. Nothing is shown if the stream (by default standard error) is not a terminal.
    """
    target = sys.stderr if stream is None else stream
    if not target.isatty():
        yield
        return
    is_done = threading.Event()
    started_s = time.monotonic()

    def draw_line() -> None:
        if is_done.wait(after_s):
            return
        target.write(_NEW_LINE)
        while True:
            target.write(_REDRAW + text(time.monotonic() - started_s))
            target.flush()
            if is_done.wait(every_s):
                break
        target.write(_BACK)
        target.flush()

    thread = threading.Thread(target=draw_line, name="hasten-waiting-line", daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_done.set()
        thread.join()
