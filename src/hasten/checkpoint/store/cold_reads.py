"""Reads of files that the page cache does not hold: past the cache where this is faster, found out on the first blocks."""

from __future__ import annotations

import ctypes
import math
import mmap
import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from time import perf_counter
from typing import Any, Final, Literal

from torch import Tensor

from hasten.checkpoint.format.formats import MappedFile
from hasten.checkpoint.store.disk import byte_view, default_threads

Way = Literal["plain", "direct"]
ALIGN_BYTES: Final = 4096
"""Alignment of direct reads in the file and in memory; that of every common disk divides it."""
_PART_BYTES = 4 * 1024**2  # of a direct read: a disk behind a network is faster the more it is asked for at once
_TRIALS = 16  # blocks read in each way before one is chosen
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
    ones in the faster way. The very first block of each thread does not count, because memory is page-locked for it. Direct reads do not fill the page cache, so they are only for a process that is the only reader of its files on
    this machine.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._trials: dict[Way, _Trial] = {"plain": _Trial(), "direct": _Trial()}
        self._begun = -default_threads()  # the first block of each thread
        self._started = threading.local()
        self.chosen: Way | None = None if _DIRECT else "plain"
        """The way for the remaining blocks; None while both are tried."""
        self.pool = ThreadPoolExecutor(4 * default_threads(), thread_name_prefix="hasten-direct")
        """Threads for the parts of direct reads; they start with the first one."""

    def close(self) -> None:
        """End the threads."""
        self.pool.shutdown()

    def way(self, file: MappedFile, start: int, stop: int) -> Way | None:
        """Return how to read a block; None if the page cache holds most of it, or if there is nothing left to choose."""
        if self.chosen == "plain" or is_cached(file, start, stop):
            return None
        with self._lock:
            self._begun += 1
            return self.chosen or ("plain" if _TRIALS < self._begun <= 2 * _TRIALS else "direct")

    @contextmanager
    def timed(self, way: Way | None, num_bytes: int) -> Iterator[None]:
        """Context manager that adds the time of a block to the trial, and chooses after enough blocks."""
        started = getattr(self._started, "value", False)
        self._started.value = True
        if way is None or self.chosen is not None or not started:
            yield
            return
        begun = perf_counter()
        yield
        with self._lock:
            trial = self._trials[way]
            if trial.blocks < _TRIALS:
                trial.blocks, trial.num_bytes = trial.blocks + 1, trial.num_bytes + num_bytes
                trial.begun, trial.ended = min(trial.begun, begun), perf_counter()
            self._choose()

    def _choose(self) -> None:
        """Choose the faster way after enough blocks, unless another thread has refused direct reads."""
        plain, direct = self._trials["plain"], self._trials["direct"]
        if self.chosen is None and min(plain.blocks, direct.blocks) >= _TRIALS:
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


def read_directly(
    file: MappedFile, start: int, stop: int, memory: Tensor, pool: ThreadPoolExecutor | None = None
) -> Tensor | None:
    """Read a range of a file past the page cache; returns its bytes, a part of `memory`, or None if this is not supported.

    `memory` are at least `room_for(stop - start)` bytes of the host; the parts of a range are read by the threads of `pool`, if it is given.
    """
    fd = file.open(_DIRECT)
    if fd is None:
        return None
    try:
        low = start // ALIGN_BYTES * ALIGN_BYTES
        high = -(-stop // ALIGN_BYTES) * ALIGN_BYTES
        shift = -memory.data_ptr() % ALIGN_BYTES
        room = memory[shift : shift + high - low]
        view, read = byte_view(room), partial(_read_part, fd, stop)
        places = range(low, high, _PART_BYTES)
        parts = [view[at - low : at - low + _PART_BYTES] for at in places]
        run = map if pool is None else pool.map
        done = list(run(read, places, parts))  # all of them, because the memory is used again after a failure
        return room[start - low : stop - low] if all(done) else None
    finally:
        os.close(fd)


def _read_part(fd: int, stop: int, at: int, room: memoryview) -> bool:
    """Fill memory from an offset up to `stop`; returns False if the file was cut off, or cannot be read so: a plain read tells which."""
    done, size = 0, min(len(room), stop - at)
    while done < size:
        try:
            count = os.preadv(fd, [room[done:]], at + done)
        except OSError:  # not supported for this file, or a broken disk
            return False
        done += count
        if not count or (done % ALIGN_BYTES and done < size):
            return False
    return True
