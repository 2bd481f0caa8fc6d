"""System calls of a local save, in one file so that tests can simulate a crash at each of them."""

from __future__ import annotations

import bisect
import ctypes
import errno
import mmap
import os
import resource
import shutil
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Final

import numpy as np
import torch
import xxhash
from torch import Tensor

from hasten.checkpoint.base import Blob
from hasten.checkpoint.format.manifest import (
    CHUNK_BYTES,
    FileRecord,
    checksum,
    open_outside,
)
from hasten.errors import CheckpointError
from hasten.runtime.devices import kind_of


def as_bytes(tensor: Tensor) -> Tensor:
    """Return a dense tensor as a flat tensor of bytes, without a copy."""
    return tensor.detach().reshape(-1).view(torch.uint8)


def host_memory(tensor: Tensor, low: int, high: int) -> memoryview:
    """Return bytes low..high of a dense tensor on the host as a view, valid as long as the tensor exists."""
    return memoryview(
        (ctypes.c_char * (high - low)).from_address(tensor.data_ptr() + low)
    ).cast("B")


def copy_bytes(target: Tensor, source: Tensor) -> None:
    """Copy flat bytes on the host on the calling thread only; torch would use all cores from every thread."""
    np.copyto(target.numpy(), source.numpy())


def is_plain(tensor: Tensor) -> bool:
    """Return True if the tensor is contiguous memory with its values unmodified, so that it can be copied as bytes."""
    device_type = tensor.device.type
    is_dense = (
        tensor.layout is torch.strided
        and device_type != "meta"
        and tensor.is_contiguous()
    )
    return is_dense and not (
        tensor.is_conj()
        or tensor.is_neg()
        or (device_type != "cpu" and kind_of(tensor.device).lazy)
    )


def devices_of(tensors: Iterable[Tensor]) -> list[torch.device]:
    """Return the accelerators with streams that hold any of the tensors; empty when all are on the host."""
    found_devices: list[torch.device] = []
    for tensor in tensors:
        device = tensor.device
        if (
            device.type != "cpu"
            and device not in found_devices
            and not kind_of(device).lazy
        ):
            found_devices.append(device)
    return found_devices


def worker_pool(
    thread_prefix: str,
    devices: Sequence[torch.device] = (),
    max_threads: int | None = None,
) -> ThreadPoolExecutor:
    """Return a pool of one thread per core, at least 2 and at most 16 or `max_threads`, for reading, writing and copies.

    The devices are synchronized first; threads have separate streams on the first of them.
    """
    for device in devices:
        torch.accelerator.synchronize(device)
    if hasattr(os, "sched_getaffinity"):
        num_cores = len(os.sched_getaffinity(0))
    else:
        num_cores = os.cpu_count() or 2
    return ThreadPoolExecutor(
        min(max(num_cores, 2), max_threads or _MAX_THREADS),
        thread_name_prefix=thread_prefix,
        initializer=partial(_set_new_stream, devices[0]) if devices else None,
    )


def finish_copies(devices: Iterable[torch.device]) -> None:
    """Wait for the copies this thread has started."""
    for device in devices:
        torch.accelerator.current_stream(device).synchronize()


def _set_new_stream(device: torch.device) -> None:
    torch.accelerator.set_stream(torch.Stream(device))


@dataclass(slots=True)
class HostBuffer:
    """One buffer per thread for copying tensors chunk by chunk; page-locked if a device is involved."""

    is_pinned: bool = False
    _buffers: dict[int, Tensor] = field(default_factory=dict)

    def take(self, num_bytes: int) -> Tensor:
        """Return the first bytes of this thread's buffer."""
        buffer = self._buffers.get(threading.get_ident())
        if buffer is None or buffer.numel() < num_bytes:
            buffer = torch.empty(
                max(num_bytes, CHUNK_BYTES),
                dtype=torch.uint8,
                pin_memory=self.is_pinned,
            )
            self._buffers[threading.get_ident()] = buffer
        return buffer if buffer.numel() == num_bytes else buffer[:num_bytes]


CHECKSUM_STEP_BYTES = 2 * 1024**2
"""Bytes checksummed before they are written: few enough to stay in the processor's cache, and enough that threads
rarely wait for each other between calls."""
WRITE_STEP_BYTES = 512 * 1024
"""Bytes per write call, which is the page size in the system's cache. Large pages are cheap to map when they are
read again; still larger ones are returned by a virtual machine to its host when they are free, and requesting
them again costs several times as much as writing."""
FULL_DISK_ERRORS: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
"""Error codes for lack of space: on the disk, in the user's quota, or within the limit for a file."""
_MAX_FEW_INODES: Final = 64
"""Free inodes up to which a disk with free space is said to lack inodes."""
READ_STEP_BYTES = 2 * 1024**2
"""Bytes per read call: the system reads ahead of a call that returns soon, and many calls in parallel keep the disk busy."""
_MIN_UNCOPIED_BYTES = 65536
_START_WRITEBACK = 2  # SYNC_FILE_RANGE_WRITE
_MAX_THREADS: Final = 16
_POPULATE_READ = 22  # MADV_POPULATE_READ, since Linux 5.14


class Disk:
    """Thin, overridable wrappers of system calls; every change of the disk goes through this class."""

    def create(self, path: Path) -> int:
        """Return a descriptor of a new, empty file."""
        return os.open(
            path,
            os.O_CREAT | os.O_EXCL | os.O_WRONLY | getattr(os, "O_CLOEXEC", 0),
            0o666,
        )

    def write_at(self, fd: int, data: Sequence[memoryview], offset: int) -> int:
        """Write data at an offset and return the number of bytes written, which may be fewer than given."""
        return os.pwritev(fd, data, offset)

    def sync(self, descriptor: int) -> None:
        """Block until the file's bytes are on the disk."""
        os.fsync(descriptor)

    def close(self, descriptor: int) -> None:
        """Close a descriptor."""
        os.close(descriptor)

    def make_folder(self, path: Path) -> None:
        """Create a folder and its parents."""
        path.mkdir(parents=True, exist_ok=True)

    def rename(self, old: Path, new: Path) -> None:
        """Rename a file or folder atomically."""
        old.rename(new)

    def sync_folder(self, path: Path) -> None:
        """Block until the folder's entries are on the disk."""
        descriptor = os.open(path, os.O_RDONLY)
        try:
            self.sync(descriptor)
        finally:
            self.close(descriptor)

    def remove_tree(self, path: Path) -> None:
        """Delete a folder recursively, ignoring files deleted concurrently. A link is removed, not its target."""
        if path.is_symlink():
            path.unlink(missing_ok=True)
        while path.exists():
            try:
                shutil.rmtree(path)
            except FileNotFoundError:  # another process is deleting too
                continue

    def remove_file(self, path: Path) -> None:
        """Delete a file, if it exists."""
        path.unlink(missing_ok=True)

    def link(self, old: Path, new: Path) -> None:
        """Create a hard link to a file."""
        os.link(old, new, follow_symlinks=False)

    def open_lock(self, path: Path) -> int:
        """Return a descriptor of a lock file, which is created if necessary."""
        return os.open(
            path,
            os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC,
            0o666,
        )


def segment_starts(blob: Blob) -> list[int]:
    """Return the offset of every segment in the file."""
    segment_offsets = []
    next_offset = 0
    for segment in blob.segments:
        segment_offsets.append(next_offset)
        if isinstance(segment, bytes):
            next_offset += len(segment)
        else:
            next_offset += segment.nbytes
    assert next_offset == blob.size, (
        f"segments hold {next_offset} bytes, the blob says {blob.size}"
    )
    return segment_offsets


def host_views(
    blob: Blob,
    start: int,
    stop: int,
    segment_offsets: Sequence[int],
    host_buffer: HostBuffer,
) -> list[memoryview]:
    """Return bytes start..stop of the file in host memory: large host tensors themselves, all others in the buffer."""
    memory_views: list[memoryview] = []
    staged_bytes: Tensor | None = None
    # bytes in the buffer, and those that a view covers already
    num_copied = num_viewed = 0
    devices: list[torch.device] = []
    first_index = max(bisect.bisect_right(segment_offsets, start) - 1, 0)
    for segment_index in range(first_index, len(segment_offsets)):
        segment_start = segment_offsets[segment_index]
        if segment_start >= stop:
            break
        segment = blob.segments[segment_index]
        if isinstance(segment, Tensor):
            segment = as_bytes(segment)
        segment = segment[max(start - segment_start, 0) : stop - segment_start]
        num_bytes = len(segment)
        if (
            isinstance(segment, Tensor)
            and segment.device.type == "cpu"
            and num_bytes >= _MIN_UNCOPIED_BYTES
        ):
            if staged_bytes is not None and num_copied > num_viewed:
                memory_views.append(staged_bytes[num_viewed:num_copied].numpy().data)
                num_viewed = num_copied
            memory_views.append(segment.numpy().data)
            continue
        if staged_bytes is None:
            staged_bytes = host_buffer.take(stop - start)
        target = staged_bytes[num_copied : num_copied + num_bytes]
        num_copied += num_bytes
        if isinstance(segment, bytes):
            target.numpy().data[:] = segment
        elif segment.device.type == "cpu":
            # on this thread only; torch would use all cores from every thread
            np.copyto(target.numpy(), segment.numpy())
        else:
            target.copy_(segment, non_blocking=True)
            devices.append(segment.device)
    if devices:
        finish_copies(set(devices))
    if staged_bytes is not None and num_copied > num_viewed:
        memory_views.append(staged_bytes[num_viewed:num_copied].numpy().data)
    return memory_views


def skip_bytes(views: Sequence[memoryview], num_skipped: int) -> list[memoryview]:
    """Return the rest of the views after their first `count` bytes."""
    remaining_views = []
    for view in views:
        if num_skipped < len(view):
            remaining_views.append(view[num_skipped:])
        num_skipped = max(num_skipped - len(view), 0)
    return remaining_views


def split_views(
    views: Sequence[memoryview], piece_bytes: int
) -> Iterator[list[memoryview]]:
    """Yield the views split into pieces of `size` bytes, the last one shorter."""
    piece: list[memoryview] = []
    free_bytes = piece_bytes
    for view in views:
        view_offset = 0
        while view_offset < len(view):
            piece.append(view[view_offset : view_offset + free_bytes])
            view_offset += len(piece[-1])
            free_bytes -= len(piece[-1])
            if not free_bytes:
                yield piece
                piece = []
                free_bytes = piece_bytes
    if piece:
        yield piece


@dataclass(frozen=True, slots=True)
class _Chunk:
    """One chunk of a file to be written."""

    index: int
    file_name: str
    blob: Blob
    segment_offsets: list[int]


def write_files(
    folder: Path, files: Mapping[str, Blob], disk: Disk, threads: int | None = None
) -> dict[str, FileRecord]:
    """Write files chunk by chunk on several threads, and return their records with checksums.

    The files are complete and on the disk when this returns.
    """
    chunks: list[_Chunk] = []
    tensors: list[Tensor] = []
    for file_name, blob in files.items():
        segment_offsets = segment_starts(blob)
        tensors += filter(torch.is_tensor, blob.segments)
        for chunk_index in range(-(-blob.size // CHUNK_BYTES)):
            chunks.append(_Chunk(chunk_index, file_name, blob, segment_offsets))
    # round-robin over the files, because the system locks a file during a write
    chunks.sort(key=attrgetter("index"))
    devices = devices_of(tensors)
    descriptors: dict[str, int] = {}
    sums_by_name: dict[str, list[str]] = {}
    write_chunk = partial(_write_chunk, disk, descriptors, HostBuffer(bool(devices)))
    try:
        for file_name in files:
            descriptors[file_name] = disk.create(folder / file_name)
            sums_by_name[file_name] = []
        with worker_pool("hasten-write", devices, threads) as thread_pool:
            for chunk, digest in zip(
                chunks, thread_pool.map(write_chunk, chunks), strict=True
            ):
                sums_by_name[chunk.file_name].append(digest)
            list(thread_pool.map(disk.sync, descriptors.values()))
    finally:
        for descriptor in descriptors.values():
            disk.close(descriptor)
    file_records = {}
    for file_name, blob in files.items():
        file_records[file_name] = FileRecord(
            name=file_name, size=blob.size, sums=tuple(sums_by_name[file_name])
        )
    return file_records


def _write_chunk(
    disk: Disk, descriptors: Mapping[str, int], host_buffer: HostBuffer, chunk: _Chunk
) -> str:
    """Write one chunk of a file and return its checksum."""
    descriptor = descriptors[chunk.file_name]
    write_offset = start = chunk.index * CHUNK_BYTES
    stop = min(start + CHUNK_BYTES, chunk.blob.size)
    memory_views = host_views(
        chunk.blob, start, stop, chunk.segment_offsets, host_buffer
    )
    chunk_hash = xxhash.xxh3_64()
    for summed_views in split_views(memory_views, CHECKSUM_STEP_BYTES):
        for view in summed_views:
            chunk_hash.update(view)
        for views in split_views(summed_views, WRITE_STEP_BYTES):
            write_end = write_offset + sum(map(len, views))
            while write_offset < write_end:
                num_written = disk.write_at(descriptor, views, write_offset)
                write_offset += num_written
                if write_offset < write_end:
                    views = skip_bytes(views, num_written)
    if stop - start == CHUNK_BYTES:
        start_writeback(descriptor, start, stop - start)
    return chunk_hash.hexdigest()


def start_writeback(descriptor: int, offset: int, length: int) -> None:
    """Ask Linux to start writing these bytes to disk now, so that the final sync has little left to do."""
    if sys.platform == "linux":
        sync_file_range = getattr(ctypes.CDLL(None), "sync_file_range", None)
        if sync_file_range is not None:  # a hint only, so a failure is harmless
            sync_file_range(
                descriptor,
                ctypes.c_int64(offset),
                ctypes.c_int64(length),
                _START_WRITEBACK,
            )


def file_checksum(path: Path, start: int, stop: int) -> str:
    """Return the checksum of bytes start..stop of a file. Raises: OSError when the disk cannot read them."""
    with open_outside(path) as file:
        descriptor = file.fileno()
        if (
            stop - start >= CHECKSUM_STEP_BYTES
            and (mapped_checksum := _checksum_mapped(descriptor, start, stop))
            is not None
        ):
            return mapped_checksum
        range_hash = xxhash.xxh3_64()
        for offset in range(start, stop, CHECKSUM_STEP_BYTES):
            range_hash.update(
                os.pread(descriptor, min(CHECKSUM_STEP_BYTES, stop - offset), offset)
            )
        return range_hash.hexdigest()


def _checksum_mapped(descriptor: int, start: int, stop: int) -> str | None:
    """Return the checksum without copying the bytes; None where the system or the disk does not support it.

    The kernel is asked to load the pages first: a disk error is then a return code instead of a signal.
    """
    if sys.platform != "linux" or start % mmap.ALLOCATIONGRANULARITY:
        return None
    try:
        mapped_view = mmap.mmap(
            descriptor, stop - start, prot=mmap.PROT_READ, offset=start
        )
    # the file is shorter than it should be, or cannot be mapped
    except (OSError, ValueError):
        return None
    mapped_bytes = np.frombuffer(mapped_view, np.uint8)
    error_code: int = ctypes.CDLL(None).madvise(
        ctypes.c_void_p(mapped_bytes.ctypes.data),
        ctypes.c_size_t(len(mapped_bytes)),
        _POPULATE_READ,
    )
    return checksum(memoryview(mapped_bytes)) if error_code == 0 else None  # type: ignore[arg-type]  # arrays are buffers


def read_all(descriptor: int, views: Sequence[memoryview], offset: int) -> int:
    """Fill the views one after another and return the number of bytes read, fewer only at the end of the file."""
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_SEQUENTIAL)
    num_read = 0
    for piece in split_views(views, READ_STEP_BYTES):
        unread_views = piece
        while unread_views:
            read_bytes = os.preadv(descriptor, unread_views, offset + num_read)
            if not read_bytes:
                return num_read
            num_read += read_bytes
            unread_views = skip_bytes(unread_views, read_bytes)
    return num_read


def cannot_write(
    description: str, folder: Path, num_bytes: int, error: OSError
) -> CheckpointError:
    """Return the error for a failed write; if there is no space left, the error names the disk."""
    if error.errno == errno.EFBIG:
        limit_bytes = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
        return CheckpointError(
            f"writing {description} to {folder} failed, because a file of this process may have {limit_bytes} bytes at most (ulimit -f): {error}. "
            "Nothing was saved, and earlier files are unchanged. Raise the limit: `ulimit -f unlimited`."
        )
    if error.errno not in FULL_DISK_ERRORS:
        return CheckpointError(
            f"{description} could not be written to {folder}: {error}. Nothing was saved, and earlier files are unchanged. Give a folder that can "
            "be written to."
        )
    existing_folder = folder.resolve()
    while not existing_folder.exists():
        existing_folder = existing_folder.parent
    mount_point = existing_folder
    while not mount_point.is_mount():
        mount_point = mount_point.parent
    disk_usage = os.statvfs(existing_folder)
    free_bytes = disk_usage.f_bavail * disk_usage.f_frsize
    size_bytes = disk_usage.f_blocks * disk_usage.f_frsize
    free_words = f"{free_bytes / 1e6:,.1f} MB of {size_bytes / 1e6:,.1f} MB are free"
    if error.errno == errno.EDQUOT:
        reason = "has no room left in your quota"
    # of the inodes, those of the failed save are free again
    elif free_bytes > num_bytes and disk_usage.f_favail <= min(
        _MAX_FEW_INODES, disk_usage.f_files - 1
    ):
        reason = f"has no room for more files: {disk_usage.f_favail} of its {disk_usage.f_files} inodes are free"
    else:
        reason = "is full"
    needed_words = f"; this rank writes {num_bytes / 1e6:,.1f} MB" if num_bytes else ""
    return CheckpointError(
        f"writing {description} failed, because the disk of {folder} (mounted at {mount_point}) {reason}: {error.strerror or error}. {free_words}{needed_words}. "
        "Nothing was saved, and earlier files are unchanged. Delete old checkpoints (total_limit does so automatically), or save to "
        "another disk."
    )
