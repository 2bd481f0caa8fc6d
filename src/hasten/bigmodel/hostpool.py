"""Host memory for offloaded weights: page-locked in large slabs, so that devices read it at full speed."""

from __future__ import annotations

import logging
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from hasten.bigmodel.budget import free_host_bytes
from hasten.bigmodel.solver import readable
from hasten.checkpoint.store.disk import default_threads

log = logging.getLogger(__name__)
ALIGN_BYTES = 512
"""Tensors begin at multiples of this, as torch's own allocators place them: kernels are chosen by alignment."""
SLAB_BYTES = 1024**3
"""A power of two, to which page-locked memory is rounded up anyway."""
PINNED_SHARE = 0.8
"""Page-locked memory cannot be swapped out: this part of what is free now is taken at most."""


def aligned(num_bytes: int) -> int:
    """Rounded up to where the next tensor may begin."""
    return -(-num_bytes // ALIGN_BYTES) * ALIGN_BYTES


class HostPool:
    """Slabs of host memory, page-locked as far as the bound allows, from which tensors are cut one after another."""

    def __init__(self, pinned: bool, pinned_bytes: int | None = None) -> None:
        """`pinned_bytes` bounds the page-locked memory; by default a share of what is free."""
        self._pin = pinned
        self._bound = int(PINNED_SHARE * free_host_bytes()) if pinned_bytes is None else pinned_bytes
        self._lock = threading.Lock()
        self._ready: list[Tensor] = []
        self._adopted: dict[int, Tensor] = {}
        self._size = SLAB_BYTES
        self._slab: Tensor | None = None
        self._used = 0
        self.pinned_bytes = 0
        self.num_bytes = 0

    def reserve(self, num_bytes: int) -> None:
        """Take memory for about this much, in parallel; taking page-locked memory is slow, so it is said."""
        slabs = max(1, -(-num_bytes // SLAB_BYTES))
        size = self._size = SLAB_BYTES if slabs > 1 else _power_of_two(max(num_bytes, ALIGN_BYTES))
        started = time.perf_counter()
        with ThreadPoolExecutor(min(default_threads(), slabs), thread_name_prefix="hasten-pin") as pool:
            self._ready += list(pool.map(self._take, [size] * slabs))
        if self._pin and num_bytes > SLAB_BYTES:
            log.info(
                "page-locked %s of host memory in %.1f s",
                readable(self.pinned_bytes),
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
            self._give_up(f"the bound of {readable(self._bound)} of page-locked memory is reached. Raise pinned_bytes.")
        return False

    def _give_up(self, why: str) -> None:
        with self._lock:
            said, self._pin = not self._pin, False
        if not said:
            log.warning("%s Further offloaded weights use ordinary memory, which devices read more slowly.", why)

    def adopt(self, tensor: Tensor) -> tuple[Tensor, int] | None:
        """The slab a tensor lies in and where, if that memory is page-locked already; None when it must move."""
        if not self._pin or tensor.device.type != "cpu" or not tensor.is_pinned():
            return None
        storage = tensor.untyped_storage()
        slab = self._adopted.get(storage.data_ptr())
        if slab is None:
            slab = self._adopted[storage.data_ptr()] = torch.empty(0, dtype=torch.uint8).set_(storage)
        start = int(tensor.storage_offset()) * tensor.element_size()
        return (slab, start) if start % ALIGN_BYTES == 0 else None

    def cut(self, num_bytes: int) -> tuple[Tensor, int, Tensor]:
        """Bytes for one tensor: the slab they lie in, where they begin, and the bytes themselves."""
        if self._slab is None or self._used + num_bytes > self._slab.numel():
            fits = next((i for i, slab in enumerate(self._ready) if slab.numel() >= num_bytes), None)
            size = max(_power_of_two(num_bytes), min(self._size, SLAB_BYTES))
            self._slab = self._ready.pop(fits) if fits is not None else self._take(size)
            self._used = 0
        start = self._used
        self._used = start + aligned(num_bytes)
        self.num_bytes += num_bytes
        return self._slab, start, self._slab[start : start + num_bytes]


def _power_of_two(num_bytes: int) -> int:
    return 1 << max(num_bytes - 1, 1).bit_length()
