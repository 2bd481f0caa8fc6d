"""The bar of a load: the share that is done, and GB/s."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, TextColumn
from rich.progress import Progress as Bar

Progress = Callable[[int, int], None]
"""Called with the bytes loaded so far and the bytes there are."""


@contextmanager
def reporting(progress: Progress | bool | None, console: Console | None = None) -> Iterator[Progress | None]:
    """What to call as bytes come in: the caller's own function, a bar on the standard error for True, or nothing."""
    if not isinstance(progress, bool):
        yield progress
        return
    if not progress:
        yield None
        return
    columns = (TextColumn("loading"), BarColumn(), DownloadColumn(), TextColumn("{task.fields[speed]}"))
    # rich also takes FORCE_COLOR, which notebooks set for the processes they start, for a terminal
    console = console or Console(stderr=True, force_terminal=sys.stderr.isatty())
    with Bar(*columns, console=console, auto_refresh=False) as bar:
        task, started = bar.add_task("loading", total=None, speed=""), time.perf_counter()

        def advance(done: int, total: int) -> None:
            speed = done / 1e9 / max(time.perf_counter() - started, 1e-9)
            bar.update(task, completed=done, total=total, speed=f"{speed:.2f} GB/s", refresh=True)

        yield advance
