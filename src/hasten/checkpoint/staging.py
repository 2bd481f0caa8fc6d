"""Host copies of what a save will write, taken fast and kept for the next save."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor

from hasten.checkpoint.base import Blob
from hasten.checkpoint.format.manifest import CHUNK_BYTES
from hasten.checkpoint.store.disk import default_threads
from hasten.checkpoint.transfer import as_bytes, copy_bytes, devices_of, is_plain, worker_pool

Memory = tuple[torch.device, int, int]
BLOCK_BYTES = 1024**3
"""Host memory is taken in blocks of this size: page-locked memory is rounded up to a power of two."""


class Staging:
    """Blocks of host memory, page-locked when the tensors come from a device, reused from save to save.

    `begin` starts the copies, so that the files can be laid out meanwhile; `end` waits for them.
    """

    def __init__(self, block_bytes: int = BLOCK_BYTES) -> None:
        self._block_bytes = block_bytes
        self._blocks: list[Tensor] = []
        self._pinned = False
        self._places = _Places([])
        self._copied: dict[Memory, list[Tensor]] = {}
        self._errands: Errands | None = None

    @property
    def num_bytes(self) -> int:
        """Host memory held."""
        return sum(block.numel() for block in self._blocks)

    def begin(self, tensors: Sequence[Tensor]) -> None:
        """Start to copy tensors to the host; they must not change before `end` returns."""
        self.abandon()
        dense = [tensor for tensor in tensors if is_plain(tensor)]
        devices = devices_of(dense)
        self.reserve(sum(t.numel() * t.element_size() for t in dense), devices[0] if devices else None)
        self._places = _Places(self._blocks)
        self._errands = Errands(devices)
        with self._errands.running():
            for tensor in dense:
                self._pieces(tensor)

    def end(self, blobs: Mapping[str, Blob]) -> dict[str, Blob]:
        """The files with host copies in place of every tensor; the originals may change afterwards."""
        if self._errands is None:
            self.begin([segment for blob in blobs.values() for segment in blob.segments if isinstance(segment, Tensor)])
        assert self._errands is not None, "copies were begun"
        staged = {}
        with self._errands.running():
            for name, blob in blobs.items():
                segments: list[bytes | Tensor] = []
                for segment in blob.segments:
                    segments += [segment] if isinstance(segment, bytes) else self._pieces(segment)
                staged[name] = Blob(segments, blob.size)
        self.abandon()
        return staged

    def abandon(self) -> None:
        """Wait for copies that have begun, and forget which they were."""
        errands, self._errands = self._errands, None
        self._copied = {}
        if errands is not None:
            errands.wait()

    def _pieces(self, tensor: Tensor) -> list[Tensor]:
        """The host copy of a tensor, on its way; one for each memory, however often it is asked for."""
        assert self._errands is not None, "copies were begun"
        memory = (tensor.device, tensor.data_ptr(), tensor.numel() * tensor.element_size())
        if (known := self._copied.get(memory)) is not None:
            return known
        pieces = self._copied[memory] = []
        for source in chunks(as_bytes(tensor)):
            for target, part in self._places.fit(source, self._grow):
                pieces.append(target)
                self._errands.copy(target, part)
        return pieces

    def _grow(self, num_bytes: int) -> None:
        """Take more memory for what was not announced: a tensor that had to be laid out anew."""
        self._take(self.num_bytes + num_bytes)

    def reserve(self, num_bytes: int, device: torch.device | None) -> None:
        """Hold at least this much memory; taking page-locked memory is slow, so it is kept."""
        if self._pinned != (device is not None):
            self._blocks, self._pinned = [], device is not None
        self._take(num_bytes)

    def _take(self, num_bytes: int) -> None:
        missing = num_bytes - self.num_bytes
        sizes = []
        while missing > 0:
            size = self._block_bytes if self._pinned or missing > self._block_bytes else missing
            sizes.append(size)
            missing -= size
        if sizes:
            with worker_pool(min(default_threads(), len(sizes)), [], "hasten-reserve") as pool:
                make = partial(torch.empty, dtype=torch.uint8, pin_memory=self._pinned)
                self._blocks += list(pool.map(make, sizes))

    def release(self) -> None:
        """Give the memory back."""
        self._blocks = []


class _Places:
    """Hands out consecutive pieces of the blocks."""

    def __init__(self, blocks: list[Tensor]) -> None:
        self._blocks = blocks
        self._index = 0
        self._used = 0

    def fit(self, source: Tensor, grow: Callable[[int], None]) -> list[tuple[Tensor, Tensor]]:
        """Pairs of a free place and the part of the source that goes there; `grow` adds blocks when all are full."""
        pairs = []
        while source.numel():
            if self._index == len(self._blocks):
                grow(source.numel())
            block = self._blocks[self._index]
            room = block.numel() - self._used
            if room == 0:
                self._index, self._used = self._index + 1, 0
                continue
            part, source = source[:room], source[room:]
            pairs.append((block[self._used : self._used + part.numel()], part))
            self._used += part.numel()
        return pairs


class Errands:
    """Copies under way: on a stream of their own from the first device, on threads within the host."""

    def __init__(self, devices: Sequence[torch.device]) -> None:
        device = devices[0] if devices else None
        self._device, self._others = device, devices[1:]
        self._stream: torch.Stream | None = None
        self._pool: ThreadPoolExecutor | None = None
        self._waiting: list[Future[None]] = []
        if device is None:
            # more threads than that wait for the interpreter between copies, and for each other
            self._pool = ThreadPoolExecutor(min(default_threads(), 4), thread_name_prefix="hasten-stage")
        else:
            self._stream = torch.Stream(device)
            self._stream.wait_stream(torch.accelerator.current_stream(device))

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Start one copy, within `running`."""
        if self._pool is not None:
            self._waiting.append(self._pool.submit(copy_bytes, target, source))
        else:
            target.copy_(source, non_blocking=True)

    def wait(self) -> None:
        """Return when all copies are done."""
        if self._pool is not None:
            self._pool.shutdown()
            for one in self._waiting:
                one.result()
        if self._stream is not None:
            self._stream.synchronize()
        for device in self._others:  # whose copies went along with what else it does
            torch.accelerator.synchronize(device)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Copies that are started in the block go to the stream, if there is one."""
        if self._stream is None:
            yield
            return
        before = torch.accelerator.current_stream(self._device)
        torch.accelerator.set_stream(self._stream)
        try:
            yield
        finally:
            torch.accelerator.set_stream(before)


def chunks(flat: Tensor) -> list[Tensor]:
    """A flat tensor in pieces of one chunk, without copies."""
    return [flat[start : start + CHUNK_BYTES] for start in range(0, flat.numel(), CHUNK_BYTES)]
