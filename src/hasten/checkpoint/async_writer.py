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
    devices_of,
    host_views,
    is_plain,
    segment_starts,
    worker_pool,
)
from hasten.comm.agreement import Agreement, agreeing
from hasten.comm.base import Comm

log = logging.getLogger(__name__)

MemoryAddress = tuple[torch.device, int, int]
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
        host_copies: dict[MemoryAddress, Tensor] = {}
        for batch in self._batches:
            host_copies |= batch.finish()
        staged_blobs = {}
        for file_name, blob in blobs.items():
            segments: list[bytes | Tensor] = []
            for segment in blob.segments:
                segments.append(
                    segment
                    if isinstance(segment, bytes)
                    else host_copies[_address(segment)]
                )
            staged_blobs[file_name] = Blob(segments, blob.size)
        self._batches = []
        return staged_blobs

    def _start(self, tensors: Sequence[Tensor]) -> None:
        """Start copying those tensors whose memory is not being copied yet."""
        copied_addresses = {
            address for batch in self._batches for address in batch.addresses
        }
        source_tensors = {
            _address(tensor): tensor for tensor in tensors if is_plain(tensor)
        }
        batch = _CopyBatch(
            {
                address: tensor
                for address, tensor in source_tensors.items()
                if address not in copied_addresses
            }
        )
        batch_index = len(self._batches)
        if batch_index == len(self._memories):
            self._memories.append(torch.empty(0, dtype=torch.uint8))
        if self._memories[batch_index].numel() < batch.num_bytes:
            self._memories[batch_index] = _allocate(batch.num_bytes)
        self._batches.append(batch)
        batch.start(self._memories[batch_index])

    def discard(self) -> None:
        """Wait for the copies in flight, then discard the record of them."""
        batches = self._batches
        self._batches = []
        for batch in batches:
            batch.wait()

    def release(self) -> None:
        """Free the memory."""
        self._memories = []


class _CopyBatch:
    """Tensors that are copied one behind the other into host memory, by threads."""

    def __init__(self, source_tensors: Mapping[MemoryAddress, Tensor]) -> None:
        self.addresses = list(source_tensors)
        tensor_sizes = [size for _, _, size in self.addresses]
        self.num_bytes = sum(tensor_sizes)
        self._blob = Blob(list(source_tensors.values()), self.num_bytes)
        self._starts = segment_starts(self._blob)
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._pool: ThreadPoolExecutor | None = None
        self._futures: list[Future[None]] = []

    def start(self, host_memory: Tensor) -> None:
        """Start the copies."""
        self._memory = host_memory
        devices = devices_of(
            segment for segment in self._blob.segments if isinstance(segment, Tensor)
        )
        pinned_buffer = HostBuffer(bool(devices))
        # on the host, more threads would wait for the interpreter lock between copies, and for each other
        max_threads = None if devices else 4
        self._pool = worker_pool("hasten-stage", devices, max_threads)
        for start in range(0, self.num_bytes, CHUNK_BYTES):
            self._futures.append(self._pool.submit(self._copy, start, pinned_buffer))

    def _copy(self, start: int, pinned_buffer: HostBuffer) -> None:
        stop = min(start + CHUNK_BYTES, self.num_bytes)
        for view in host_views(self._blob, start, stop, self._starts, pinned_buffer):
            copy_bytes(
                self._memory[start : start + len(view)],
                torch.frombuffer(view, dtype=torch.uint8),
            )
            start += len(view)

    def wait(self) -> None:
        """Wait for the copies that were started, whether they succeed or fail."""
        if self._pool is not None:
            self._pool.shutdown()

    def finish(self) -> dict[MemoryAddress, Tensor]:
        """Wait for the copies and return them. Raises: the error of a copy."""
        self.wait()
        for copy in self._futures:
            copy.result()
        host_copies = {}
        for (device, pointer, size), start in zip(
            self.addresses, self._starts, strict=True
        ):
            host_copies[device, pointer, size] = self._memory[start : start + size]
        return host_copies


def _address(tensor: Tensor) -> MemoryAddress:
    return tensor.device, tensor.data_ptr(), tensor.numel() * tensor.element_size()


def _allocate(num_bytes: int) -> Tensor:
    """Return host memory in large pages where the system has them, which are ready for use sooner."""
    host_memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(AttributeError, OSError):
        host_memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(host_memory, dtype=torch.uint8)


class AsyncWriter:
    """Writer that runs one background thread at a time, with a separate process group.

    The thread is not a daemon: the interpreter waits for it at exit, so a save in flight is completed.
    """

    def __init__(self) -> None:
        self.comm: Comm | None = None
        """Process group of the background thread; the ranks create it together at the first background save."""
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._start_event: threading.Event | None = None
        self._cancelled = False
        self._has_exit_callback = False
        self.staging = HostStaging()

    def submit(
        self, work: Callable[[Agreement], object], checkpoint_name: str
    ) -> threading.Event:
        """Start a thread that runs `work`, in an agreement of its group, once the returned event is set; `cancel` ends the thread instead.

        Before setting the event, ranks can check that all of them have started their thread.
        Raises: the error of the previous save.
        """
        self.wait()
        writer_comm = self.comm
        start_event = threading.Event()
        assert writer_comm is not None, "the ranks have made a group for the thread"
        self._cancelled = False

        def run() -> None:
            start_event.wait()
            if self._cancelled:
                return
            try:
                with agreeing(
                    writer_comm, f"saving {checkpoint_name!r} in the background"
                ) as agreement:
                    work(agreement)
            # raised on the training thread at its next save, wait or close
            except BaseException as error:
                self._error = error
                log.error(
                    "saving %s in the background failed: %s", checkpoint_name, error
                )

        self._finish_before_exit()
        self._thread = threading.Thread(
            target=run, name=f"hasten-save-{checkpoint_name}", daemon=False
        )
        self._start_event = start_event
        self._thread.start()
        return start_event

    def cancel(self) -> None:
        """End the thread that waits for its event, if there is one, without running its work."""
        self._cancelled = True
        if self._start_event is not None:
            self._start_event.set()
        if self._thread is not None and self._thread.ident is not None:
            self._thread.join()
        self._thread = None

    def _finish_before_exit(self) -> None:
        """Join the thread before Python refuses new threads: at exit, thread pools close before threads are joined."""
        if self._has_exit_callback:
            return
        self._has_exit_callback = True
        writer_reference = weakref.ref(self)

        def join() -> None:
            living_writer = writer_reference()
            if living_writer is not None and living_writer._thread is not None:
                living_writer._thread.join()

        # Callbacks run in reverse order, so this one precedes that of concurrent.futures, which closes its pools. The
        # function is private in Python, with no public equivalent: atexit comes too late.
        register_atexit = getattr(threading, "_register_atexit", None)
        if register_atexit is not None:
            register_atexit(join)

    def wait(self) -> None:
        """Wait for the save in flight, if any.

        Raises: the error of the save, once.
        """
        if self._thread is not None:
            self._thread.join()
        # only now: a signal handler may wait for the same save meanwhile
        self._thread = None
        save_error = self._error
        self._error = None
        if save_error is not None:
            raise save_error

    def close(self) -> None:
        """Wait for the save in flight and free the staging memory. Raises: the error of the save."""
        try:
            self.wait()
        finally:
            self.staging.release()
