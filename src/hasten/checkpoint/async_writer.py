"""Background saves: one in flight at a time; an error is raised at the next save, wait or close."""

from __future__ import annotations

import logging
import mmap
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress

import torch
from torch import Tensor

from hasten.checkpoint.base import Blob
from hasten.checkpoint.format.manifest import CHUNK_BYTES
from hasten.checkpoint.store.disk import (
    HostBuffer,
    copy_bytes,
    default_threads,
    devices_of,
    host_views,
    is_plain,
    segment_starts,
    worker_pool,
)
from hasten.comm.agreement import Agreement, agreeing
from hasten.comm.base import Comm

log = logging.getLogger(__name__)

Address = tuple[torch.device, int, int]
"""Device, address and size of a tensor's memory."""


class HostStaging:
    """Host memory that holds the tensors of a background save while it is written, reused from save to save.

    It is not page-locked, which would take seconds: each thread copies from a device through a small page-locked buffer.
    `begin` starts the copies, so that the file layout is computed meanwhile; `end` waits for the copies.
    """

    def __init__(self) -> None:
        self._memories: list[Tensor] = []
        self._batches: list[_CopyBatch] = []

    @property
    def num_bytes(self) -> int:
        """Bytes of host memory allocated."""
        return sum(memory.numel() for memory in self._memories)

    def begin(self, tensors: Sequence[Tensor]) -> None:
        """Start copying tensors to the host; the tensors must not change before `end` returns."""
        self.discard()
        self._start(tensors)

    def end(self, blobs: Mapping[str, Blob]) -> dict[str, Blob]:
        """Return the files with a host copy in place of every tensor; the original tensors may change afterwards."""
        self._start(
            [
                segment
                for blob in blobs.values()
                for segment in blob.segments
                if isinstance(segment, Tensor)
            ]
        )
        copies: dict[Address, Tensor] = {}
        for batch in self._batches:
            copies |= batch.finish()
        staged = {}
        for name, blob in blobs.items():
            segments: list[bytes | Tensor] = []
            for segment in blob.segments:
                segments.append(
                    segment if isinstance(segment, bytes) else copies[_address(segment)]
                )
            staged[name] = Blob(segments, blob.size)
        self._batches = []
        return staged

    def _start(self, tensors: Sequence[Tensor]) -> None:
        """Start copying those tensors whose memory is not being copied yet."""
        known = {address for batch in self._batches for address in batch.addresses}
        sources = {_address(tensor): tensor for tensor in tensors if is_plain(tensor)}
        batch = _CopyBatch(
            {
                address: tensor
                for address, tensor in sources.items()
                if address not in known
            }
        )
        number = len(self._batches)
        if number == len(self._memories):
            self._memories.append(torch.empty(0, dtype=torch.uint8))
        if self._memories[number].numel() < batch.num_bytes:
            self._memories[number] = _allocate(batch.num_bytes)
        self._batches.append(batch)
        batch.start(self._memories[number])

    def discard(self) -> None:
        """Wait for the copies in flight, then discard the record of them."""
        batches, self._batches = self._batches, []
        for batch in batches:
            batch.finish()

    def release(self) -> None:
        """Free the memory."""
        self._memories = []


class _CopyBatch:
    """Tensors that are copied one behind the other into host memory, by threads."""

    def __init__(self, sources: Mapping[Address, Tensor]) -> None:
        self.addresses = list(sources)
        sizes = [size for _, _, size in self.addresses]
        self.num_bytes = sum(sizes)
        self._blob = Blob(list(sources.values()), self.num_bytes)
        self._starts = segment_starts(self._blob)
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._pool: ThreadPoolExecutor | None = None
        self._waiting: list[Future[None]] = []

    def start(self, memory: Tensor) -> None:
        """Start the copies."""
        self._memory = memory
        devices = devices_of(
            segment for segment in self._blob.segments if isinstance(segment, Tensor)
        )
        buffer = HostBuffer(bool(devices))
        # on the host, more threads would wait for the interpreter lock between copies, and for each other
        threads = default_threads() if devices else min(default_threads(), 4)
        self._pool = worker_pool(threads, devices, "hasten-stage")
        for start in range(0, self.num_bytes, CHUNK_BYTES):
            self._waiting.append(self._pool.submit(self._copy, start, buffer))

    def _copy(self, start: int, buffer: HostBuffer) -> None:
        stop = min(start + CHUNK_BYTES, self.num_bytes)
        for view in host_views(self._blob, start, stop, self._starts, buffer):
            copy_bytes(
                self._memory[start : start + len(view)],
                torch.frombuffer(view, dtype=torch.uint8),
            )
            start += len(view)

    def finish(self) -> dict[Address, Tensor]:
        """Wait for the copies and return them."""
        assert self._pool is not None, "the copies were started"
        self._pool.shutdown()
        for copy in self._waiting:
            copy.result()
        copies = {}
        for (device, pointer, size), start in zip(
            self.addresses, self._starts, strict=True
        ):
            copies[device, pointer, size] = self._memory[start : start + size]
        return copies


def _address(tensor: Tensor) -> Address:
    return tensor.device, tensor.data_ptr(), tensor.numel() * tensor.element_size()


def _allocate(num_bytes: int) -> Tensor:
    """Return host memory in large pages where the system has them, which are ready for use sooner."""
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(AttributeError, OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)


class AsyncWriter:
    """Writer that runs one background thread at a time, with a separate process group.

    The thread is not a daemon: the interpreter waits for it at exit, so a save in flight is completed.
    """

    def __init__(self) -> None:
        self.comm: Comm | None = None
        """Process group of the background thread; the ranks create it together at the first background save."""
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._go: threading.Event | None = None
        self._cancelled = False
        self._registered = False
        self.staging = HostStaging()

    def submit(self, work: Callable[[Agreement], object], name: str) -> threading.Event:
        """Start a thread that runs `work`, in an agreement of its group, once the returned event is set; `cancel` ends the thread instead.

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
                with agreeing(comm, f"saving {name!r} in the background") as together:
                    work(together)
            # raised on the training thread at its next save, wait or close
            except BaseException as error:
                self._error = error
                log.error("saving %s in the background failed: %s", name, error)

        self._finish_before_exit()
        self._thread = threading.Thread(
            target=run, name=f"hasten-save-{name}", daemon=False
        )
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

    def wait(self) -> None:
        """Wait for the save in flight, if any.

        Raises: the error of the save, once.
        """
        if self._thread is not None:
            self._thread.join()
        # only now: a signal handler may wait for the same save meanwhile
        self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error

    def close(self) -> None:
        """Wait for the save in flight and free the staging memory. Raises: the error of the save."""
        try:
            self.wait()
        finally:
            self.staging.release()
