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
from hasten.runtime.bytes_plan import format_bytes as shown_size

log = logging.getLogger(__name__)
ALIGN_BYTES: Final = 512
"""Tensors start at multiples of this, as with torch's allocators: kernels are chosen by alignment."""
SLAB_BYTES: Final = 1024**3
"""A power of two, to which page-locked memory is rounded up anyway."""
PINNED_SHARE: Final = 0.8
"""Largest share of the free host memory to page-lock, since page-locked memory cannot be swapped out."""
_MAX_THREADS: Final = 16


def aligned_bytes(num_bytes: int) -> int:
    """Return the size rounded up to the next aligned start."""
    return -(-num_bytes // ALIGN_BYTES) * ALIGN_BYTES


class HostPool:
    """Slabs of host memory, page-locked up to a limit, from which tensors are allocated one after another."""

    def __init__(self, pinned: bool, pinned_bytes: int | None = None) -> None:
        """Create an empty pool; `pinned_bytes` limits the page-locked memory, by default to a share of what is free."""
        self._pin = pinned
        if pinned_bytes is None:
            self._pinned_limit_bytes = int(PINNED_SHARE * free_host_bytes())
        else:
            self._pinned_limit_bytes = pinned_bytes
        self._lock = threading.Lock()
        self._free_slabs: list[Tensor] = []
        self._adopted: dict[int, Tensor] = {}
        self._size = SLAB_BYTES
        self._slab: Tensor | None = None
        self._used = 0
        self.pinned_bytes = 0
        self.num_bytes = 0

    def reserve_bytes(self, num_bytes: int) -> None:
        """Allocate slabs for about `num_bytes` in parallel, and log the time, since page-locking is slow."""
        num_slabs = max(1, -(-num_bytes // SLAB_BYTES))
        slab_bytes = self._size = (
            SLAB_BYTES if num_slabs > 1 else _power_of_two(max(num_bytes, ALIGN_BYTES))
        )
        start_s = time.perf_counter()
        with ThreadPoolExecutor(
            min(_MAX_THREADS, num_slabs), thread_name_prefix="hasten-pin"
        ) as thread_pool:
            self._free_slabs += list(
                thread_pool.map(self._allocate_slab, [slab_bytes] * num_slabs)
            )
        if self._pin and num_bytes > SLAB_BYTES:
            log.info(
                "page-locked %s of host memory in %.1f s",
                shown_size(self.pinned_bytes),
                time.perf_counter() - start_s,
            )

    def _allocate_slab(self, slab_bytes: int) -> Tensor:
        with torch.inference_mode(False):
            if self._may_pin(slab_bytes):
                try:
                    return torch.empty(slab_bytes, dtype=torch.uint8, pin_memory=True)
                except RuntimeError as error:
                    self._stop_pinning(
                        f"host memory could not be page-locked ({str(error).splitlines()[0]}). Raise the limit of locked "
                        "memory (ulimit -l) or offload less."
                    )
                    self.pinned_bytes -= slab_bytes
            return torch.empty(slab_bytes, dtype=torch.uint8)

    def _may_pin(self, slab_bytes: int) -> bool:
        with self._lock:
            if self._pin and self.pinned_bytes + slab_bytes <= self._pinned_limit_bytes:
                self.pinned_bytes += slab_bytes
                return True
        if self._pin:
            self._stop_pinning(
                f"the bound of {shown_size(self._pinned_limit_bytes)} of page-locked memory is reached. Raise pinned_bytes."
            )
        return False

    def _stop_pinning(self, reason: str) -> None:
        with self._lock:
            was_warned = not self._pin
            self._pin = False
        if not was_warned:
            log.warning(
                "%s Further offloaded weights use ordinary memory, which is slower to copy to the device.",
                reason,
            )

    def adopt_tensor(self, tensor: Tensor) -> tuple[Tensor, int] | None:
        """Return the slab and offset of a tensor that is page-locked already; None if it must be copied."""
        if not self._pin or tensor.device.type != "cpu" or not tensor.is_pinned():
            return None
        storage = tensor.untyped_storage()
        adopted_slab = self._adopted.get(storage.data_ptr())
        if adopted_slab is None:
            adopted_slab = self._adopted[storage.data_ptr()] = torch.empty(
                0, dtype=torch.uint8
            ).set_(storage)
        start_bytes = int(tensor.storage_offset()) * tensor.element_size()
        if start_bytes % ALIGN_BYTES == 0:
            return (adopted_slab, start_bytes)
        return None

    def cut_bytes(self, num_bytes: int) -> tuple[Tensor, int, Tensor]:
        """Allocate bytes for one tensor; returns the slab, the offset in it and the bytes."""
        if self._slab is None or self._used + num_bytes > self._slab.numel():
            slab_index = None
            for index, slab in enumerate(self._free_slabs):
                if slab.numel() >= num_bytes:
                    slab_index = index
                    break
            slab_bytes = max(_power_of_two(num_bytes), min(self._size, SLAB_BYTES))
            if slab_index is not None:
                self._slab = self._free_slabs.pop(slab_index)
            else:
                self._slab = self._allocate_slab(slab_bytes)
            self._used = 0
        start_bytes = self._used
        self._used = start_bytes + aligned_bytes(num_bytes)
        self.num_bytes += num_bytes
        return (
            self._slab,
            start_bytes,
            self._slab[start_bytes : start_bytes + num_bytes],
        )


def _power_of_two(num_bytes: int) -> int:
    return 1 << max(num_bytes - 1, 1).bit_length()


def free_host_bytes() -> int:
    """Return the host memory available without swapping, as estimated by the kernel and limited by the container."""
    free_bytes = 8 * 1024**3
    meminfo = Path("/proc/meminfo")
    if available("psutil"):  # reads the same on Linux, and knows other systems
        free_bytes = int(need("psutil").virtual_memory().available)
    elif meminfo.is_file():
        meminfo_fields = dict(
            line.split(":", 1) for line in meminfo.read_text("utf-8").splitlines()
        )
        free_bytes = int(meminfo_fields["MemAvailable"].split()[0]) * 1024
    limit_file = Path("/sys/fs/cgroup/memory.max")
    usage_file = Path("/sys/fs/cgroup/memory.current")
    if (
        limit_file.is_file()
        and usage_file.is_file()
        and (limit_text := limit_file.read_text("utf-8").strip()).isdigit()
    ):
        free_bytes = min(
            free_bytes, max(int(limit_text) - int(usage_file.read_text("utf-8")), 0)
        )
    return free_bytes
