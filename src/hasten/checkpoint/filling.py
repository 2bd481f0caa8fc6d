"""Filling live tensors from checkpoint files: many tensors per read, directly into their memory where possible."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from hasten.checkpoint.format.formats import MappedFile
from hasten.checkpoint.format.manifest import CHUNK_BYTES
from hasten.checkpoint.reshard import Copy
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
    read_all,
    worker_pool,
)
from hasten.errors import CheckpointError, CorruptCheckpointError

_GAP_BYTES = 65536  # a smaller gap between two tensors is read and discarded rather than skipped
_MOST_TENSORS = 400  # a read fills at most 1024 buffers, and every tensor may need two


@dataclass(slots=True)
class _Stretch:
    """A byte range of a file and the tensors to fill from it: (offset in the file, target, its bytes from..to)."""

    file: MappedFile
    start: int
    stop: int
    targets: list[tuple[int, Tensor, int, int]] = field(default_factory=list)

    def takes(self, file: MappedFile, start: int) -> bool:
        """Return True if a tensor that begins at `start` can be read together with this byte range."""
        near = file is self.file and 0 <= start - self.stop < _GAP_BYTES
        return near and self.stop - self.start < CHUNK_BYTES and len(self.targets) < _MOST_TENSORS


def run_copies(
    copies: Sequence[Copy], threads: int | None = None, progress: Callable[[int], None] | None = None
) -> None:
    """Fill live tensors on any device with several threads, about one chunk at a time.

    `progress` is called with the number of bytes of every finished job.

    Raises: CheckpointError when a file can no longer be read; the tensors are then in an undefined state, which the
    caller must undo.
    """
    buffer, devices = HostBuffer(), devices_of(side for copy in copies for side in (copy.target, copy.source))
    stretches, others = _stretches(copies)
    jobs: list[Callable[[], int]] = [partial(_fill, stretch, buffer) for stretch in stretches]
    jobs += [partial(_copy, portion, buffer) for portion in _portions(others)]
    try:
        with worker_pool(threads or default_threads(), devices, "hasten-read") as pool:
            for done in pool.map(_guarded, jobs):
                if isinstance(done, CheckpointError):
                    raise done
                if progress is not None:
                    progress(done)
    finally:
        increment_version([copy.target for copy in copies])  # as an in-place operation of torch does


def _stretches(copies: Sequence[Copy]) -> tuple[list[_Stretch], list[Copy]]:
    """Return byte ranges in file order, large ones split and small ones merged, and the copies that are not reads."""
    places: list[tuple[MappedFile, int, Tensor, int]] = []
    others = []
    for copy in copies:
        at = copy.place()
        if copy.file is None or at is None:
            others.append(copy)
        else:
            places.append((copy.file, at, copy.target, copy.target.numel() * copy.target.element_size()))
    places.sort(key=lambda place: (place[0].path, place[1]))
    stretches: list[_Stretch] = []
    for file, at, target, size in places:
        for low in range(0, size, CHUNK_BYTES):
            high = min(low + CHUNK_BYTES, size)
            if not stretches or not stretches[-1].takes(file, at + low):
                stretches.append(_Stretch(file, at + low, at + low))
            stretches[-1].targets.append((at + low, target, low, high))
            stretches[-1].stop = at + high
    return stretches, others


def _portions(copies: Sequence[Copy]) -> Iterator[list[Copy]]:
    """Yield copies in groups of about one chunk, so that threads share the work and small copies are batched."""
    portion: list[Copy] = []
    size = 0
    for copy in copies:
        portion.append(copy)
        size += copy.target.numel() * copy.target.element_size()
        if size >= CHUNK_BYTES:
            yield portion
            portion, size = [], 0
    if portion:
        yield portion


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
    for copy in copies:
        if copy.target.device.type == "cpu" and _through_buffer(copy):
            _copy_to_host(copy, buffer)
        else:
            copy.target.copy_(copy.source)
    finish_copies(devices_of(copy.target for copy in copies))
    return sum(copy.target.numel() * copy.target.element_size() for copy in copies)


def _through_buffer(copy: Copy) -> bool:
    """Return True for a plain copy from an accelerator, which is faster through page-locked memory."""
    target, source = copy.target, copy.source
    same = target.dtype == source.dtype and target.shape == source.shape
    return same and bool(devices_of([source])) and is_plain(target) and is_plain(source)


def _copy_to_host(copy: Copy, buffer: HostBuffer) -> None:
    target, source = as_bytes(copy.target), as_bytes(copy.source)
    for low in range(0, source.numel(), CHUNK_BYTES):
        part = source[low : low + CHUNK_BYTES]
        staged = buffer.take(part.numel(), pinned=True)
        staged.copy_(part, non_blocking=True)
        finish_copies([source.device])
        copy_bytes(target[low : low + part.numel()], staged)


def _fill(stretch: _Stretch, buffer: HostBuffer) -> int:
    devices = devices_of(target for _, target, _, _ in stretch.targets)
    fd = stretch.file.open()
    if fd is None:
        for at, target, low, high in stretch.targets:
            as_bytes(target)[low:high].copy_(stretch.file.data[at : at + high - low])
        finish_copies(devices)
        return stretch.stop - stretch.start
    try:
        if devices:
            _read_to_devices(stretch, fd, buffer, devices)
        else:
            _read(stretch, fd, _places(stretch, buffer))
    except OSError as error:
        raise CheckpointError(
            f"{stretch.file.path}: cannot be read any more ({error}). Check the disk, and "
            "load this or another checkpoint."
        ) from error
    finally:
        os.close(fd)
    return stretch.stop - stretch.start


def _places(stretch: _Stretch, buffer: HostBuffer) -> list[memoryview]:
    """Return the memory to read the byte range into, piece by piece; gaps between tensors go to the buffer."""
    views, reached = [], stretch.start
    for at, target, low, high in stretch.targets:
        if at > reached:
            views.append(byte_view(buffer.take(at - reached, pinned=False)))
        views.append(host_memory(target, low, high))
        reached = at + high - low
    return views


def _read_to_devices(stretch: _Stretch, fd: int, buffer: HostBuffer, devices: Sequence[torch.device]) -> None:
    whole = buffer.take(stretch.stop - stretch.start, pinned=True)
    _read(stretch, fd, [byte_view(whole)])
    for at, target, low, high in stretch.targets:
        part = whole[at - stretch.start :][: high - low]
        as_bytes(target)[low:high].copy_(part, non_blocking=True)
    finish_copies(devices)


def _read(stretch: _Stretch, fd: int, views: Sequence[memoryview]) -> None:
    wanted = stretch.stop - stretch.start
    count = read_all(fd, views, stretch.start)
    if count != wanted:
        raise CorruptCheckpointError(
            f"{stretch.file.path}: {count} of {wanted} bytes at {stretch.start} could be read, so it was cut off while "
            "it was being loaded. Load another checkpoint."
        )
