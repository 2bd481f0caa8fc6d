"""Limits on time that leave out what the host of a virtual machine took away: a starved machine is slow, not stuck."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Final

_MOST: Final = 6.0  # times a limit, however little the host leaves


def processor_time() -> tuple[int, int]:
    """Return the ticks of all processors that the host took away, and those in which they worked or were to work."""
    try:
        words = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
    except FileNotFoundError:
        return 0, 0
    user, nice, system, _idle, _waiting, interrupts, soft, stolen = map(int, words[:8])
    return stolen, user + nice + system + interrupts + soft + stolen


def stolen_since(before: tuple[int, int]) -> float:
    """Return the share of the processors' time that the host of a virtual machine gave to others instead."""
    stolen, wanted = processor_time()
    return (stolen - before[0]) / max(wanted - before[1], 1)


class Limit:
    """So many seconds from now, longer by what the host takes away in them, and at most `most_s`."""

    def __init__(self, seconds: float, most_s: float = math.inf) -> None:
        self._seconds = seconds
        self._most_s = max(most_s, seconds)
        self._before = processor_time()
        self._start = time.monotonic()

    def left(self) -> float:
        """Return the seconds left by now: zero or less when the time is up."""
        allowed = self._seconds / max(1 - stolen_since(self._before), 1 / _MOST)
        return min(allowed, self._most_s) - (time.monotonic() - self._start)
