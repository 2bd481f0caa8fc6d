"""Resharding on load: copies that fill any slice of a tensor from pieces written in another layout, run in parallel (FSDP's and ZeRO's shards alike)."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from hasten.checkpoint.base import Slice
from hasten.checkpoint.format.formats import MappedFile, Piece
from hasten.checkpoint.format.manifest import CHUNK_BYTES
from hasten.checkpoint.store.disk import (
    HostBuffer,
    as_bytes,
    byte_view,
    copy_bytes,
    default_threads,
    devices_of,
    finish_copies,
    host_memory,
    is_plain,
    read_ahead,
    read_all,
    read_cached,
    skip,
    worker_pool,
)
from hasten.errors import CheckpointError, CorruptCheckpointError, OtherModelError

_READ_BYTES = CHUNK_BYTES
"""Most bytes of a read; a power of two, as torch page-locks memory in these."""
# a smaller gap between two tensors is read and discarded rather than skipped
_GAP_BYTES = 65536
_THREADS_AHEAD = 4
# 1 GiB, so that the page cache still holds what was requested when it is read
_RANGES_AHEAD = 64
_MOST_TENSORS = 400  # a read fills at most 1024 buffers, and every tensor may need two


@dataclass(frozen=True, slots=True)
class Copy:
    """One copy: a piece of memory to fill, from one piece of a file."""

    target: Tensor
    source: Tensor
    file: MappedFile | None = None

    def place(self) -> int | None:
        """Return the offset of the bytes in the file, if they can be read without conversion."""
        target, source = self.target, self.source
        plain = (
            type(target) is Tensor
            and is_plain(target)
            and source.is_contiguous()
            and target.dtype == source.dtype
        )
        return self.file.place(source) if self.file is not None and plain else None


Region = tuple[tuple[int, int], ...]  # (start, length) per dim


def overlap(
    offset: Sequence[int],
    shape: Sequence[int],
    other: Sequence[int],
    extent: Sequence[int],
) -> Region | None:
    """Return the intersection of two boxes of a global tensor, in global coordinates; None when it is empty."""
    region = []
    for a, n, b, m in zip(offset, shape, other, extent, strict=True):
        start, stop = max(a, b), min(a + n, b + m)
        if start >= stop:
            return None
        region.append((start, stop - start))
    return tuple(region)


def plan_copies(
    name: str, target: Tensor | Slice, pieces: Sequence[Piece]
) -> list[Copy]:
    """Return the copies that fill a live tensor (or a rank's slice of one) from the pieces in a checkpoint.

    Raises: OtherModelError when the shape differs; CorruptCheckpointError when a region is in no file.
    """
    live = target.data if isinstance(target, Slice) else target.detach()
    shape = target.shape if isinstance(target, Slice) else tuple(live.shape)
    offset = target.offset if isinstance(target, Slice) else (0,) * live.dim()
    for piece in pieces:
        if piece.shape != shape:
            raise OtherModelError(
                f"{name} has shape {tuple(shape)} here and {tuple(piece.shape)} in the checkpoint. Nothing was loaded. "
                "Build the model as it was when it was saved, or load with strict=False to leave this tensor out."
            )
    if live.numel() == 0:
        return []
    if live.device.type == "meta":
        raise CheckpointError(
            f"{name} is on the meta device, where there is no memory to load into. Nothing was loaded. Give the model "
            "memory first (prepare it, or call to_empty)."
        )
    # the common case, without computing overlaps
    if len(pieces) == 1 and pieces[0].data.shape == live.shape == shape:
        return [Copy(live, pieces[0].data, pieces[0].file)]
    copies, filled = [], 0
    for piece in pieces:
        region = overlap(
            offset, tuple(live.shape), piece.offset, tuple(piece.data.shape)
        )
        if region is None:
            continue
        copies.append(
            Copy(
                _cut(live, region, offset),
                _cut(piece.data, region, piece.offset),
                piece.file,
            )
        )
        filled += copies[-1].target.numel()
    if filled != live.numel():
        raise CorruptCheckpointError(
            f"{name}: the files hold {filled} of the {live.numel()} numbers this rank needs, so parts of the tensor are "
            "missing (or stored twice). Nothing was loaded. If machines do not share a disk, copy all rank files "
            "into one folder."
        )
    return copies


def _cut(tensor: Tensor, region: Region, offset: Sequence[int]) -> Tensor:
    for dim, ((start, length), base) in enumerate(zip(region, offset, strict=True)):
        if length != tensor.shape[dim]:
            tensor = tensor.narrow(dim, start - base, length)
    return tensor


def whole(pieces: Sequence[Piece], name: str) -> Tensor:
    """Return the global tensor on the CPU; a view of the mapped file when a single piece covers it."""
    first = pieces[0]
    if len(pieces) == 1 and tuple(first.data.shape) == tuple(first.shape):
        return first.data
    tensor = torch.empty(first.shape, dtype=first.data.dtype)
    for copy in plan_copies(name, tensor, pieces):
        copy.target.copy_(copy.source)
    return tensor


@dataclass(slots=True)
class _FileRange:
    """A byte range of a file and the tensors to fill from it: (offset in the file, target, its bytes from..to).

    What a thread needs is computed before the threads start: each call of torch makes a thread wait for all others that run Python code.
    """

    file: MappedFile
    start: int
    stop: int
    targets: list[tuple[int, Tensor, int, int]] = field(default_factory=list)
    devices: list[torch.device] = field(default_factory=list)
    parts: list[tuple[int, int, Tensor]] = field(default_factory=list)
    """Bytes from..to of the range, and the part of a target to copy them to, if a target is on a device."""

    def complete(self) -> None:
        """Compute what depends on all targets."""
        self.devices = devices_of(target for _, target, _, _ in self.targets)
        if self.devices:
            self.parts = [
                (
                    at - self.start,
                    at - self.start + high - low,
                    as_bytes(target)[low:high],
                )
                for at, target, low, high in self.targets
            ]

    def copy_from(self, staged: Tensor) -> None:
        """Start the copies from a buffer that holds the range, and wait for them."""
        for low, high, into in self.parts:
            source = staged if high - low == staged.numel() else staged[low:high]
            into.copy_(source, non_blocking=True)
        finish_copies(self.devices)


class _DiskReadAhead:
    """Daemon threads that request ranges from the disk in file order, some distance ahead of the threads that read them.

    A request blocks while the disk's queue is full, so it would hold up the thread that reads.
    """

    def __init__(self, ranges: Sequence[_FileRange]) -> None:
        self._ranges = iter(ranges)
        self._lock = threading.Lock()
        self._distance = threading.Semaphore(_RANGES_AHEAD)
        self._threads: list[threading.Thread] = []
        self._is_stopped = False

    def start(self) -> None:
        """Start the threads; without effect if they were started before."""
        with self._lock:
            if self._threads:
                return
            for _ in range(_THREADS_AHEAD):
                self._threads.append(
                    threading.Thread(
                        target=self._request_ranges, name="hasten-ahead", daemon=True
                    )
                )
        for thread in self._threads:
            thread.start()

    def advance(self) -> None:
        """Note that a range was read, so that another may be requested."""
        self._distance.release()

    def stop(self) -> None:
        """End the threads."""
        self._is_stopped = True
        self._distance.release(_THREADS_AHEAD)
        for thread in self._threads:
            thread.join()

    def _request_ranges(self) -> None:
        while True:
            self._distance.acquire()
            with self._lock:
                file_range = next(self._ranges, None)
            if file_range is None or self._is_stopped:
                return
            fd = file_range.file.open()
            if fd is not None:
                read_ahead(fd, file_range.start, file_range.stop)
                os.close(fd)


def run_copies(copies: Sequence[Copy], threads: int | None = None) -> None:
    """Fill live tensors on any device with several threads, about one chunk at a time.

    Raises: CheckpointError when a file can no longer be read; the tensors are then in an undefined state, which the
    caller must undo.
    """
    targets, sources = [], []
    for copy in copies:
        targets.append(copy.target)
        sources.append(copy.source)
    devices = devices_of([*targets, *sources])
    groups, ranges = _grouped(copies)
    buffer, ahead = HostBuffer(bool(devices)), _DiskReadAhead(ranges)
    jobs: list[Callable[[], int]] = [partial(_copy, group, buffer) for group in groups]
    jobs += [partial(_fill, file_range, buffer, ahead) for file_range in ranges]
    try:
        with worker_pool(threads or default_threads(), devices, "hasten-read") as pool:
            for done in pool.map(_guarded, jobs):
                if isinstance(done, CheckpointError):
                    raise done
    finally:
        ahead.stop()
        increment_version(targets)  # as an in-place operation of torch does


def _grouped(copies: Sequence[Copy]) -> tuple[list[list[Copy]], list[_FileRange]]:
    """Return the copies in parts of about one chunk: byte ranges to read in file order, and groups of other copies."""
    groups: list[list[Copy]] = []
    places: list[tuple[str, int, int, int]] = []
    grouped = 0
    for number, copy in enumerate(copies):
        size, at = copy.target.numel() * copy.target.element_size(), copy.place()
        if copy.file is not None and at is not None:
            places.append((str(copy.file.path), at, number, size))
            continue
        if not groups or grouped >= CHUNK_BYTES:
            groups.append([])
            grouped = 0
        groups[-1].append(copy)
        grouped += size
    ranges: list[_FileRange] = []
    for _, at, number, size in sorted(places):
        file, target = copies[number].file, copies[number].target
        assert file is not None, "only copies from a file are read"
        for low in range(0, size, _READ_BYTES):
            start, high = at + low, min(low + _READ_BYTES, size)
            last = ranges[-1] if ranges else None
            if (
                last is None
                or file is not last.file
                or not 0 <= start - last.stop < _GAP_BYTES
                or at + high - last.start > _READ_BYTES
                or len(last.targets) >= _MOST_TENSORS
            ):
                last = _FileRange(file, start, start)
                ranges.append(last)
            last.targets.append((start, target, low, high))
            last.stop = at + high
    for one in ranges:
        one.complete()
    return groups, ranges


def _guarded(job: Callable[[], int]) -> CheckpointError | int:
    """Run a job; return the number of bytes copied, or the error."""
    try:
        with torch.no_grad():
            return job()
    except RuntimeError as error:
        return CheckpointError(f"copying a tensor from the checkpoint failed: {error}")
    except CheckpointError as error:
        return error


def _copy(copies: Sequence[Copy], buffer: HostBuffer) -> int:
    num_bytes, targets = 0, []
    for copy in copies:
        target, source = copy.target, copy.source
        num_bytes += target.numel() * target.element_size()
        targets.append(target)
        if (
            target.device.type == "cpu"
            and source.device.type != "cpu"
            and _through_buffer(target, source)
        ):
            _copy_to_host(target, source, buffer)
        else:
            target.copy_(source)
    finish_copies(devices_of(targets))
    return num_bytes


def _through_buffer(target: Tensor, source: Tensor) -> bool:
    """Return True for a plain copy from an accelerator, which is faster through page-locked memory."""
    same = target.dtype == source.dtype and target.shape == source.shape
    return same and bool(devices_of([source])) and is_plain(target) and is_plain(source)


def _copy_to_host(target: Tensor, source: Tensor, buffer: HostBuffer) -> None:
    target, source = as_bytes(target), as_bytes(source)
    for low in range(0, source.numel(), CHUNK_BYTES):
        part = source[low : low + CHUNK_BYTES]
        staged = buffer.take(part.numel())
        staged.copy_(part, non_blocking=True)
        finish_copies([source.device])
        copy_bytes(target[low : low + part.numel()], staged)


def _fill(wanted: _FileRange, buffer: HostBuffer, ahead: _DiskReadAhead) -> int:
    """Read a range and copy it to its tensors; from the mapping, if the file has lost its name."""
    fd, size = wanted.file.open(), wanted.stop - wanted.start
    if fd is None:
        for at, target, low, high in wanted.targets:
            as_bytes(target)[low:high].copy_(wanted.file.data[at : at + high - low])
        finish_copies(wanted.devices)
        return size
    staged = buffer.take(size) if wanted.devices else None
    views = _memory_of(wanted, buffer) if staged is None else [byte_view(staged)]
    try:
        count = read_cached(fd, views, wanted.start)
        if count < size:
            ahead.start()
        count += read_all(fd, skip(views, count), wanted.start + count)
    except OSError as error:
        raise CheckpointError(
            f"{wanted.file.path}: cannot be read any more ({error}). Check the disk, and load this or another checkpoint."
        ) from error
    finally:
        os.close(fd)
        ahead.advance()
    if count != size:
        raise CorruptCheckpointError(
            f"{wanted.file.path}: {count} of {size} bytes at {wanted.start} could be read, so it was cut off while "
            "it was being loaded. Load another checkpoint."
        )
    if staged is not None:
        wanted.copy_from(staged)
    return size


def _memory_of(wanted: _FileRange, buffer: HostBuffer) -> list[memoryview]:
    """Return the memory to read the byte range into, piece by piece; gaps between tensors go to the buffer."""
    views, reached = [], wanted.start
    for at, target, low, high in wanted.targets:
        if at > reached:
            views.append(byte_view(buffer.take(at - reached)))
        views.append(host_memory(target, low, high))
        reached = at + high - low
    return views
