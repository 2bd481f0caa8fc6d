"""Host copies of what a save will write, taken fast and kept for the next save."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor

from hasten.checkpoint.base import Blob
from hasten.checkpoint.disk import default_threads
from hasten.checkpoint.manifest import CHUNK_BYTES
from hasten.checkpoint.transfer import as_bytes, device_of, worker_pool

BLOCK_BYTES = 1024**3
"""Host memory is taken in blocks of this size: page-locked memory is rounded up to a power of two."""


class Staging:
    """Blocks of host memory, page-locked when the tensors come from a device, reused from save to save."""

    def __init__(self, block_bytes: int = BLOCK_BYTES) -> None:
        self._block_bytes = block_bytes
        self._blocks: list[Tensor] = []

    @property
    def num_bytes(self) -> int:
        """Host memory held."""
        return sum(block.numel() for block in self._blocks)

    def copy(self, blobs: Mapping[str, Blob]) -> dict[str, Blob]:
        """The same files, with every tensor copied to the host; the originals may change afterwards."""
        tensors = [s for blob in blobs.values() for s in blob.segments if isinstance(s, Tensor)]
        device = device_of(tensors)
        self.reserve(sum(t.numel() * t.element_size() for t in tensors), device)
        places = self._places()
        jobs = []
        staged = {}
        for name, blob in blobs.items():
            segments: list[bytes | Tensor] = []
            for segment in blob.segments:
                if isinstance(segment, bytes):
                    segments.append(segment)
                    continue
                for source in chunks(as_bytes(segment)):
                    for target, part in places.fit(source):
                        segments.append(target)
                        jobs.append(partial(_copy, target, part))
            staged[name] = Blob(segments, blob.size)
        with worker_pool(default_threads() if device is None else 4, device, "hasten-stage") as pool:
            list(pool.map(lambda job: job(), jobs))
        if device is not None:
            torch.accelerator.synchronize(device)
        return staged

    def reserve(self, num_bytes: int, device: torch.device | None) -> None:
        """Hold at least this much memory; taking page-locked memory is slow, so it is kept."""
        pinned = device is not None
        if self._blocks and self._blocks[0].is_pinned() != pinned:
            self._blocks = []
        missing = num_bytes - self.num_bytes
        sizes = []
        while missing > 0:
            size = self._block_bytes if pinned or missing > self._block_bytes else missing
            sizes.append(size)
            missing -= size
        with worker_pool(min(default_threads(), max(len(sizes), 1)), None, "hasten-reserve") as pool:
            make = partial(torch.empty, dtype=torch.uint8, pin_memory=pinned)
            self._blocks += list(pool.map(make, sizes))

    def _places(self) -> _Places:
        return _Places(self._blocks)

    def release(self) -> None:
        """Give the memory back."""
        self._blocks = []


class _Places:
    """Hands out consecutive pieces of the blocks."""

    def __init__(self, blocks: list[Tensor]) -> None:
        self._blocks = blocks
        self._index = 0
        self._used = 0

    def fit(self, source: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Pairs of a free place and the part of the source that goes there."""
        pairs = []
        while source.numel():
            block = self._blocks[self._index]
            room = block.numel() - self._used
            if room == 0:
                self._index, self._used = self._index + 1, 0
                continue
            part, source = source[:room], source[room:]
            pairs.append((block[self._used : self._used + part.numel()], part))
            self._used += part.numel()
        return pairs


def _copy(target: Tensor, source: Tensor) -> None:
    target.copy_(source, non_blocking=True)


def chunks(flat: Tensor) -> list[Tensor]:
    """A flat tensor in pieces of one chunk, without copies."""
    return [flat[start : start + CHUNK_BYTES] for start in range(0, flat.numel(), CHUNK_BYTES)]
