"""Reads of files that the page cache does not hold: past the cache where this is faster, found out on the first blocks."""

from __future__ import annotations

import ctypes
import math
import mmap
import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from time import perf_counter
from types import MappingProxyType
from typing import Any, Final, Literal

from torch import Tensor

from hasten.checkpoint.format.formats import MappedFile
from hasten.checkpoint.store.disk import byte_view, default_threads

Way = Literal["plain", "direct"]
ALIGN_BYTES: Final = 4096
"""Alignment of direct reads in the file and in memory; that of every common disk divides it."""
_TRIALS: Final[Mapping[Way, int]] = MappingProxyType(
    {"direct": 32, "plain": 8}
)  # blocks read in each way before one is chosen
_GAIN = 1.3  # direct reads must be this much faster, because plain ones leave the file in the cache for the next load
_DIRECT: Final[int] = getattr(os, "O_DIRECT", 0)


@dataclass(slots=True)
class _Trial:
    """Blocks that were read in one way, by all threads together."""

    blocks: int = 0
    num_bytes: int = 0
    begun: float = math.inf
    ended: float = 0.0

    @property
    def speed(self) -> float:
        """Bytes per second."""
        return self.num_bytes / max(self.ended - self.begun, 1e-9)


class ColdReads:
    """Choice between plain and direct reads for the blocks of one load that are not in the page cache.

    The first blocks are read directly and the next ones plainly, because reads of both kinds at once would slow each other; the remaining
    ones in the faster way. The first two blocks of each thread do not count: memory is page-locked for them, and a disk needs a moment to
    reach its speed. Direct reads do not fill the page cache, so they are only for a process that is the only reader of its files on
    this machine.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._trials: dict[Way, _Trial] = {"plain": _Trial(), "direct": _Trial()}
        self._uncounted = 2 * default_threads()
        self._begun = 0
        self.chosen: Way | None = None if _DIRECT else "plain"
        """The way for the remaining blocks; None while both are tried."""

    def way(self, file: MappedFile, start: int, stop: int) -> Way | None:
        """Return how to read a block; None if the page cache holds most of it, or if there is nothing left to choose."""
        if self.chosen == "plain" or is_cached(file, start, stop):
            return None
        with self._lock:
            self._begun += 1
            since_direct = self._begun - self._uncounted - _TRIALS["direct"]
            return self.chosen or ("plain" if 0 < since_direct <= _TRIALS["plain"] else "direct")

    @contextmanager
    def timed(self, way: Way | None, num_bytes: int) -> Iterator[None]:
        """Context manager that adds the time of a block to the trial, and chooses after enough blocks."""
        if way is None or self.chosen is not None or self._begun <= self._uncounted:
            yield
            return
        begun = perf_counter()
        yield
        with self._lock:
            trial = self._trials[way]
            if trial.blocks < _TRIALS[way]:
                trial.blocks, trial.num_bytes = trial.blocks + 1, trial.num_bytes + num_bytes
                trial.begun, trial.ended = min(trial.begun, begun), perf_counter()
            self._choose()

    def _choose(self) -> None:
        """Choose the faster way after enough blocks, unless another thread has refused direct reads."""
        plain, direct = self._trials["plain"], self._trials["direct"]
        if self.chosen is None and plain.blocks >= _TRIALS["plain"] and direct.blocks >= _TRIALS["direct"]:
            self.chosen = "direct" if direct.speed >= _GAIN * plain.speed else "plain"

    def refuse(self) -> None:
        """Choose plain reads: this file system, or this file, has no direct ones."""
        with self._lock:
            self.chosen = "plain"


@cache  # looking the function up takes longer than calling it
def _mincore() -> Any:  # Any: a function of the C library, or None
    """Return the system call that tells which pages are in memory; it returns at once, so other threads need not run meanwhile."""
    return getattr(ctypes.PyDLL(None), "mincore", None)


def is_cached(file: MappedFile, start: int, stop: int) -> bool:
    """Return whether the page cache holds most of a range, by its first, middle and last page; True where the system does not tell."""
    ask = _mincore()
    if ask is None:
        return True
    held, page = 0, ctypes.c_ubyte()
    for at in (start, (start + stop) // 2, stop - 1):
        address = file.data.data_ptr() + at // mmap.PAGESIZE * mmap.PAGESIZE
        failed: int = ask(ctypes.c_void_p(address), ctypes.c_size_t(1), ctypes.byref(page))
        held += bool(failed or page.value & 1)
    return held >= 2


def room_for(size: int) -> int:
    """Return the bytes of memory that a direct read of `size` bytes needs, wherever the range and the memory begin."""
    return size + 3 * ALIGN_BYTES


def read_directly(file: MappedFile, start: int, stop: int, memory: Tensor) -> Tensor | None:
    """Read a range of a file past the page cache; returns its bytes, a part of `memory`, or None if this is not supported.

    `memory` are at least `room_for(stop - start)` bytes of the host.
    """
    fd = file.open(_DIRECT)
    if fd is None:
        return None
    try:
        low = start // ALIGN_BYTES * ALIGN_BYTES
        high = -(-stop // ALIGN_BYTES) * ALIGN_BYTES
        shift = -memory.data_ptr() % ALIGN_BYTES
        room = memory[shift : shift + high - low]
        done = 0
        while done < stop - low:
            count = os.preadv(fd, [byte_view(room[done:])], low + done)
            done += count
            if not count or (done % ALIGN_BYTES and done < stop - low):
                return None  # the file was cut off, or is read in parts that cannot be continued: a plain read tells
        return room[start - low : stop - low]
    except OSError:  # not supported for this file, or a broken disk, which the plain read after this one reports
        return None
    finally:
        os.close(fd)
