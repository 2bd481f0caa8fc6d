"""Background saves: one in flight at a time; an error is raised at the next save, wait or close."""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from functools import partial

import torch
from torch import Tensor

from hasten.checkpoint.base import Blob
from hasten.checkpoint.format.manifest import CHUNK_BYTES
from hasten.checkpoint.store.disk import as_bytes, copy_bytes, default_threads, devices_of, is_plain, worker_pool
from hasten.checkpoint.writer import SaveOutcome
from hasten.comm.agreement import agreeing
from hasten.comm.base import Comm
from hasten.runtime.streams import on_stream

Memory = tuple[torch.device, int, int]
BLOCK_BYTES = 1024**3
"""Size of the host memory blocks: page-locked allocations are rounded up to a power of two."""


class HostStaging:
    """Blocks of host memory, page-locked when the tensors come from a device, reused from save to save.

    `begin` starts the copies, so that the file layout is computed meanwhile; `end` waits for the copies.
    """

    def __init__(self, block_bytes: int = BLOCK_BYTES) -> None:
        self._block_bytes = block_bytes
        self._blocks: list[Tensor] = []
        self._pinned = False
        self._allocator = _BlockAllocator([])
        self._copied: dict[Memory, list[Tensor]] = {}
        self._copies: AsyncCopies | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes of host memory allocated."""
        return sum(block.numel() for block in self._blocks)

    def begin(self, tensors: Sequence[Tensor]) -> None:
        """Start copying tensors to the host; the tensors must not change before `end` returns."""
        self.discard()
        dense = [tensor for tensor in tensors if is_plain(tensor)]
        devices = devices_of(dense)
        self.reserve(sum(t.numel() * t.element_size() for t in dense), devices[0] if devices else None)
        self._allocator = _BlockAllocator(self._blocks)
        self._copies = AsyncCopies(devices)
        with self._copies.running():
            for tensor in dense:
                self._pieces(tensor)

    def end(self, blobs: Mapping[str, Blob]) -> dict[str, Blob]:
        """Return the files with a host copy in place of every tensor; the original tensors may change afterwards."""
        if self._copies is None:
            self.begin([segment for blob in blobs.values() for segment in blob.segments if isinstance(segment, Tensor)])
        assert self._copies is not None, "copies were started"
        staged = {}
        with self._copies.running():
            for name, blob in blobs.items():
                segments: list[bytes | Tensor] = []
                for segment in blob.segments:
                    segments += [segment] if isinstance(segment, bytes) else self._pieces(segment)
                staged[name] = Blob(segments, blob.size)
        self.discard()
        return staged

    def discard(self) -> None:
        """Wait for the copies in flight, then discard the record of them."""
        copies, self._copies = self._copies, None
        self._copied = {}
        if copies is not None:
            copies.wait()

    def _pieces(self, tensor: Tensor) -> list[Tensor]:
        """Return the host copy of a tensor, which may still be in flight; tensors that share memory share one copy."""
        assert self._copies is not None, "copies were started"
        memory = (tensor.device, tensor.data_ptr(), tensor.numel() * tensor.element_size())
        if (known := self._copied.get(memory)) is not None:
            return known
        pieces = self._copied[memory] = []
        for source in chunks(as_bytes(tensor)):
            for target, part in self._allocator.fit(source, self._grow):
                pieces.append(target)
                self._copies.copy(target, part)
        return pieces

    def _grow(self, num_bytes: int) -> None:
        """Allocate memory for bytes that `begin` did not count, such as a tensor that had to be made contiguous."""
        self._take(self.num_bytes + num_bytes)

    def reserve(self, num_bytes: int, device: torch.device | None) -> None:
        """Allocate at least this much memory; it is reused by later saves, because page-locking is slow."""
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
        """Free the memory."""
        self._blocks = []


class _BlockAllocator:
    """Allocator of consecutive slices of the blocks."""

    def __init__(self, blocks: list[Tensor]) -> None:
        self._blocks = blocks
        self._index = 0
        self._used = 0

    def fit(self, source: Tensor, grow: Callable[[int], None]) -> list[tuple[Tensor, Tensor]]:
        """Return pairs of a free slice and the source bytes to copy there; `grow` adds blocks when all are full."""
        pairs = []
        while source.numel():
            if self._index == len(self._blocks):
                grow(source.numel())
            block = self._blocks[self._index]
            free = block.numel() - self._used
            if free == 0:
                self._index, self._used = self._index + 1, 0
                continue
            part, source = source[:free], source[free:]
            pairs.append((block[self._used : self._used + part.numel()], part))
            self._used += part.numel()
        return pairs


class AsyncCopies:
    """Asynchronous copies: on a separate stream for the first device, on threads within the host."""

    def __init__(self, devices: Sequence[torch.device]) -> None:
        device = devices[0] if devices else None
        self._others = devices[1:]
        self._stream: torch.Stream | None = None
        self._pool: ThreadPoolExecutor | None = None
        self._waiting: list[Future[None]] = []
        if device is None:
            # more threads would wait for the interpreter lock between copies, and for each other
            self._pool = ThreadPoolExecutor(min(default_threads(), 4), thread_name_prefix="hasten-stage")
        else:
            self._stream = torch.Stream(device)
            self._stream.wait_stream(torch.accelerator.current_stream(device))

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Start one copy; call within `running`."""
        if self._pool is not None:
            self._waiting.append(self._pool.submit(copy_bytes, target, source))
        else:
            target.copy_(source, non_blocking=True)

    def wait(self) -> None:
        """Block until all copies are done."""
        if self._pool is not None:
            self._pool.shutdown()
            for one in self._waiting:
                one.result()
        if self._stream is not None:
            self._stream.synchronize()
        for device in self._others:  # their copies ran on the device's current stream
            torch.accelerator.synchronize(device)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Context manager that makes the copy stream current, if there is one."""
        with nullcontext() if self._stream is None else on_stream(self._stream):
            yield


def chunks(flat: Tensor) -> list[Tensor]:
    """Return views of a flat tensor, one per chunk."""
    return [flat[start : start + CHUNK_BYTES] for start in range(0, flat.numel(), CHUNK_BYTES)]


log = logging.getLogger(__name__)


class AsyncWriter:
    """Writer that runs one background thread at a time, with a separate process group.

    The thread is not a daemon: the interpreter waits for it at exit, so a save in flight is completed.
    """

    def __init__(self) -> None:
        self.comm: Comm | None = None
        """Process group of the background thread; the ranks create it together at the first background save."""
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._outcome: SaveOutcome | None = None
        self._go: threading.Event | None = None
        self._cancelled = False
        self._registered = False
        self._reserving: threading.Thread | None = None
        self.staging = HostStaging()

    def reserve(self, num_bytes: int, device: torch.device | None) -> None:
        """Allocate the memory for the first save in the background, because page-locking is slow."""
        self.wait_for_memory()
        self._reserving = threading.Thread(target=self.staging.reserve, args=(num_bytes, device), name="hasten-reserve")
        self._reserving.start()

    def wait_for_memory(self) -> None:
        """Block until the allocation started by `reserve` is complete."""
        thread, self._reserving = self._reserving, None
        if thread is not None:
            thread.join()

    def begin(self, tensors: Sequence[Tensor]) -> None:
        """Start copying the tensors to be written to the host."""
        self.wait_for_memory()
        self.staging.begin(tensors)

    def stage(self, blobs: Mapping[str, Blob]) -> dict[str, Blob]:
        """Return the files with every tensor copied to the host; training may continue when this returns."""
        return self.staging.end(blobs)

    def submit(self, work: Callable[[], SaveOutcome], name: str) -> threading.Event:
        """Start a thread that runs `work` once the returned event is set; `cancel` ends the thread instead.

        Before setting the event, ranks can check that all of them have started their thread.
        Raises: the error of the previous save.
        """
        self.wait()
        comm, go = self.comm, threading.Event()
        assert comm is not None, "the ranks have made a group for the thread"
        self._cancelled = False

        def run() -> None:
            go.wait()
            if self._cancelled:
                return
            try:
                with agreeing(comm, f"saving {name!r} in the background"):
                    self._outcome = work()
            except BaseException as error:  # raised on the training thread at its next save, wait or close
                self._error = error
                log.error("saving %s in the background failed: %s", name, error)

        self._finish_before_exit()
        self._thread = threading.Thread(target=run, name=f"hasten-save-{name}", daemon=False)
        self._go = go
        self._thread.start()
        return go

    def cancel(self) -> None:
        """End the thread that waits for its event, if there is one, without running its work."""
        self._cancelled = True
        if self._go is not None:
            self._go.set()
        if self._thread is not None and self._thread.ident is not None:
            self._thread.join()
        self._thread = None

    def _finish_before_exit(self) -> None:
        """Join the thread before Python refuses new threads: at exit, thread pools close before threads are joined."""
        if self._registered:
            return
        self._registered = True
        writer = weakref.ref(self)

        def join() -> None:
            if (still := writer()) is not None and still._thread is not None:
                still._thread.join()

        # Callbacks run in reverse order, so this one precedes that of concurrent.futures, which closes its pools. The
        # function is private in Python, with no public equivalent: atexit comes too late.
        register = getattr(threading, "_register_atexit", None)
        if register is not None:
            register(join)

    def wait(self) -> SaveOutcome | None:
        """Wait for the save in flight and return its outcome; None if there was no save.

        Raises: the error of the save, once.
        """
        if self._thread is not None:
            self._thread.join()
        self._thread = None  # only now: a signal handler may wait for the same save meanwhile
        error, self._error = self._error, None
        outcome, self._outcome = self._outcome, None
        if error is not None:
            raise error
        return outcome

    def close(self) -> None:
        """Wait for the save in flight and free the staging memory. Raises: the error of the save."""
        try:
            self.wait()
        finally:
            self.wait_for_memory()
            self.staging.release()
