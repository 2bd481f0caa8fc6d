"""Time limits that exclude the time stolen by the host of a virtual machine, which makes a machine slow, not stuck."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Final

_MAX_FACTOR: Final = 6.0  # largest factor on a limit


def processor_time() -> tuple[int, int]:
    """Return the ticks stolen by the host, and the ticks in which processors worked or should have worked."""
    try:
        words = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
    except FileNotFoundError:
        return 0, 0
    user, nice, system, _idle, _waiting, interrupts, soft, stolen = map(int, words[:8])
    return stolen, user + nice + system + interrupts + soft + stolen


def stolen_since(earlier: tuple[int, int]) -> float:
    """Return the share of the processors' time that the host of a virtual machine has stolen."""
    stolen, demanded = processor_time()
    return (stolen - earlier[0]) / max(demanded - earlier[1], 1)


class Limit:
    """Limit of some seconds from now, extended by the time that the host steals, up to `most_s`."""

    def __init__(self, seconds: float, most_s: float = math.inf) -> None:
        self._seconds = seconds
        self._most_s = max(most_s, seconds)
        self._before = processor_time()
        self._start = time.monotonic()

    def left(self) -> float:
        """Return the remaining seconds: zero or less if the time is up."""
        allowed = self._seconds / max(1 - stolen_since(self._before), 1 / _MAX_FACTOR)
        return min(allowed, self._most_s) - (time.monotonic() - self._start)
