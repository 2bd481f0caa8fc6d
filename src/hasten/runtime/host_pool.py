"""Host memory for tensors that are copied to a device: slabs, page-locked as far as memory allows."""

from __future__ import annotations

import logging
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from hasten.optional import available, need
from hasten.runtime.bytes_plan import size as shown_size

log = logging.getLogger(__name__)
ALIGN_BYTES: Final = 512
"""Tensors start at multiples of this, as with torch's allocators: kernels are chosen by alignment."""
SLAB_BYTES: Final = 1024**3
"""A power of two, to which page-locked memory is rounded up anyway."""
PINNED_SHARE: Final = 0.8
"""Largest share of the free host memory to page-lock, since page-locked memory cannot be swapped out."""
_MOST_THREADS: Final = 16


def aligned(num_bytes: int) -> int:
    """Return the size rounded up to the next aligned start."""
    return -(-num_bytes // ALIGN_BYTES) * ALIGN_BYTES


class HostPool:
    """Slabs of host memory, page-locked up to a limit, from which tensors are allocated one after another."""

    def __init__(self, pinned: bool, pinned_bytes: int | None = None) -> None:
        """Create an empty pool; `pinned_bytes` limits the page-locked memory, by default to a share of what is free."""
        self._pin = pinned
        self._bound = (
            int(PINNED_SHARE * free_host_bytes())
            if pinned_bytes is None
            else pinned_bytes
        )
        self._lock = threading.Lock()
        self._ready: list[Tensor] = []
        self._adopted: dict[int, Tensor] = {}
        self._size = SLAB_BYTES
        self._slab: Tensor | None = None
        self._used = 0
        self.pinned_bytes = 0
        self.num_bytes = 0

    def reserve(self, num_bytes: int) -> None:
        """Allocate slabs for about `num_bytes` in parallel, and log the time, since page-locking is slow."""
        slabs = max(1, -(-num_bytes // SLAB_BYTES))
        slab_bytes = self._size = (
            SLAB_BYTES if slabs > 1 else _power_of_two(max(num_bytes, ALIGN_BYTES))
        )
        started = time.perf_counter()
        with ThreadPoolExecutor(
            min(_MOST_THREADS, slabs), thread_name_prefix="hasten-pin"
        ) as pool:
            self._ready += list(pool.map(self._take, [slab_bytes] * slabs))
        if self._pin and num_bytes > SLAB_BYTES:
            log.info(
                "page-locked %s of host memory in %.1f s",
                shown_size(self.pinned_bytes),
                time.perf_counter() - started,
            )

    def _take(self, size: int) -> Tensor:
        with torch.inference_mode(False):
            if self._may_pin(size):
                try:
                    return torch.empty(size, dtype=torch.uint8, pin_memory=True)
                except RuntimeError as error:
                    self._give_up(
                        f"host memory could not be page-locked ({str(error).splitlines()[0]}). Raise the limit of locked "
                        "memory (ulimit -l) or offload less."
                    )
                    self.pinned_bytes -= size
            return torch.empty(size, dtype=torch.uint8)

    def _may_pin(self, size: int) -> bool:
        with self._lock:
            if self._pin and self.pinned_bytes + size <= self._bound:
                self.pinned_bytes += size
                return True
        if self._pin:
            self._give_up(
                f"the bound of {shown_size(self._bound)} of page-locked memory is reached. Raise pinned_bytes."
            )
        return False

    def _give_up(self, why: str) -> None:
        with self._lock:
            said, self._pin = not self._pin, False
        if not said:
            log.warning(
                "%s Further offloaded weights use ordinary memory, which is slower to copy to the device.",
                why,
            )

    def adopt(self, tensor: Tensor) -> tuple[Tensor, int] | None:
        """Return the slab and offset of a tensor that is page-locked already; None if it must be copied."""
        if not self._pin or tensor.device.type != "cpu" or not tensor.is_pinned():
            return None
        storage = tensor.untyped_storage()
        slab = self._adopted.get(storage.data_ptr())
        if slab is None:
            slab = self._adopted[storage.data_ptr()] = torch.empty(
                0, dtype=torch.uint8
            ).set_(storage)
        start = int(tensor.storage_offset()) * tensor.element_size()
        return (slab, start) if start % ALIGN_BYTES == 0 else None

    def cut(self, num_bytes: int) -> tuple[Tensor, int, Tensor]:
        """Allocate bytes for one tensor; returns the slab, the offset in it and the bytes."""
        if self._slab is None or self._used + num_bytes > self._slab.numel():
            fits = next(
                (i for i, slab in enumerate(self._ready) if slab.numel() >= num_bytes),
                None,
            )
            size = max(_power_of_two(num_bytes), min(self._size, SLAB_BYTES))
            self._slab = self._ready.pop(fits) if fits is not None else self._take(size)
            self._used = 0
        start = self._used
        self._used = start + aligned(num_bytes)
        self.num_bytes += num_bytes
        return self._slab, start, self._slab[start : start + num_bytes]


def _power_of_two(num_bytes: int) -> int:
    return 1 << max(num_bytes - 1, 1).bit_length()


def free_host_bytes() -> int:
    """Return the host memory available without swapping, as estimated by the kernel and limited by the container."""
    free = 8 * 1024**3
    meminfo = Path("/proc/meminfo")
    if available("psutil"):  # reads the same on Linux, and knows other systems
        free = int(need("psutil").virtual_memory().available)
    elif meminfo.is_file():
        lines = dict(
            line.split(":", 1) for line in meminfo.read_text("utf-8").splitlines()
        )
        free = int(lines["MemAvailable"].split()[0]) * 1024
    limit, used = (
        Path("/sys/fs/cgroup/memory.max"),
        Path("/sys/fs/cgroup/memory.current"),
    )
    if (
        limit.is_file()
        and used.is_file()
        and (text := limit.read_text("utf-8").strip()).isdigit()
    ):
        free = min(free, max(int(text) - int(used.read_text("utf-8")), 0))
    return free
