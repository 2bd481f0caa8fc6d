"""`hasten report --live`: renders the report again whenever the files of a run have grown, until interrupted."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from hasten.tracking.run_folder import run_files

Stamp = tuple[tuple[str, int, int], ...]


def stamp(folders: Sequence[str]) -> Stamp:
    """Return the files of the runs with their sizes and times, to detect growth; empty until all runs have started."""
    files = [run_files(Path(folder)) for folder in folders]
    return tuple(_facts(path) for paths in files for path in paths) if all(files) else ()


def _facts(path: Path) -> tuple[str, int, int]:
    facts = path.stat()
    return str(path), facts.st_size, facts.st_mtime_ns


def follow(folders: Sequence[str], every_s: float, render: Callable[[], None]) -> int:
    """Call `render` whenever the runs have grown, at most every `every_s` seconds; return the count after Ctrl-C."""
    count, last = 0, None
    try:
        while True:
            now = stamp(folders)
            if now and now != last:
                render()
                count, last = count + 1, now
            time.sleep(every_s)
    except KeyboardInterrupt:
        return count
