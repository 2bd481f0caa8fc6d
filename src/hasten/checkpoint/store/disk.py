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
from operator import itemgetter
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


def byte_view(tensor: Tensor) -> memoryview:
    """Return a flat byte tensor on the host as a memoryview."""
    return memoryview(tensor.numpy().data)


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
    kind = tensor.device.type
    dense = tensor.layout is torch.strided and kind != "meta" and tensor.is_contiguous()
    return dense and not (
        tensor.is_conj()
        or tensor.is_neg()
        or (kind != "cpu" and kind_of(tensor.device).lazy)
    )


def devices_of(tensors: Iterable[Tensor]) -> list[torch.device]:
    """Return the accelerators with streams that hold any of the tensors; empty when all are on the host."""
    found: list[torch.device] = []
    for tensor in tensors:
        device = tensor.device
        if device.type != "cpu" and device not in found and not kind_of(device).lazy:
            found.append(device)
    return found


def worker_pool(
    threads: int, devices: Sequence[torch.device], name: str
) -> ThreadPoolExecutor:
    """Return a thread pool for copies after synchronizing the devices; threads have separate streams on the first."""
    for device in devices:
        torch.accelerator.synchronize(device)
    if not devices:
        return ThreadPoolExecutor(threads, thread_name_prefix=name)
    return ThreadPoolExecutor(
        threads,
        thread_name_prefix=name,
        initializer=_own_stream,
        initargs=(devices[0],),
    )


def finish_copies(devices: Iterable[torch.device]) -> None:
    """Wait for the copies this thread has started."""
    for device in devices:
        torch.accelerator.current_stream(device).synchronize()


def _own_stream(device: torch.device) -> None:
    torch.accelerator.set_stream(torch.Stream(device))


class HostBuffer(threading.local):
    """One buffer per thread for copying tensors chunk by chunk; page-locked if a device is involved."""

    def __init__(self, pinned: bool = False) -> None:
        self._pinned = pinned
        self._buffer: Tensor | None = None

    def take(self, size: int) -> Tensor:
        """Return the first `size` bytes of this thread's buffer."""
        if self._buffer is None or self._buffer.numel() < size:
            self._buffer = torch.empty(
                max(size, CHUNK_BYTES), dtype=torch.uint8, pin_memory=self._pinned
            )
        return self._buffer if self._buffer.numel() == size else self._buffer[:size]


SUM_BYTES = 2 * 1024**2
"""Bytes checksummed before they are written: few enough to stay in the processor's cache, and enough that threads
rarely wait for each other between calls."""
WRITE_BYTES = 512 * 1024
"""Bytes per write call, which is the page size in the system's cache. Large pages are cheap to map when they are
read again; still larger ones are returned by a virtual machine to its host when they are free, and requesting
them again costs several times as much as writing."""
FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
"""Error codes for lack of space: on the disk, in the user's quota, or within the limit for a file."""
READ_AHEAD_BYTES = 512 * 1024
"""Bytes requested from the disk in one call: the system cuts longer requests to what the disk takes at once."""
_OWN_WRITE_BYTES = 65536
_START_WRITEBACK = 2  # SYNC_FILE_RANGE_WRITE
_POPULATE_READ = 22  # MADV_POPULATE_READ, since Linux 5.14


def default_threads() -> int:
    """Return the number of threads for reading and writing: one per core, at least 2 and at most 16."""
    return max(
        2,
        min(
            16,
            len(os.sched_getaffinity(0))
            if hasattr(os, "sched_getaffinity")
            else os.cpu_count() or 2,
        ),
    )


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

    def sync(self, fd: int) -> None:
        """Block until the file's bytes are on the disk."""
        os.fsync(fd)

    def close(self, fd: int) -> None:
        """Close a descriptor."""
        os.close(fd)

    def make_folder(self, path: Path) -> None:
        """Create a folder and its parents."""
        path.mkdir(parents=True, exist_ok=True)

    def rename(self, old: Path, new: Path) -> None:
        """Rename a file or folder atomically."""
        old.rename(new)

    def sync_folder(self, path: Path) -> None:
        """Block until the folder's entries are on the disk."""
        fd = os.open(path, os.O_RDONLY)
        try:
            self.sync(fd)
        finally:
            self.close(fd)

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
    starts, at = [], 0
    for segment in blob.segments:
        starts.append(at)
        at += (
            len(segment)
            if isinstance(segment, bytes)
            else segment.numel() * segment.element_size()
        )
    assert at == blob.size, f"segments hold {at} bytes, the blob says {blob.size}"
    return starts


def host_views(
    blob: Blob, start: int, stop: int, starts: Sequence[int], buffer: HostBuffer
) -> list[memoryview]:
    """Return bytes start..stop of the file in host memory: large host tensors themselves, all others in the buffer."""
    views: list[memoryview] = []
    staged: Tensor | None = None
    copied = used = 0  # bytes in the buffer, and those that a view covers already
    devices: list[torch.device] = []
    for index in range(max(bisect.bisect_right(starts, start) - 1, 0), len(starts)):
        if starts[index] >= stop:
            break
        segment, low, high = (
            blob.segments[index],
            max(start - starts[index], 0),
            stop - starts[index],
        )
        part = (
            segment[low:high]
            if isinstance(segment, bytes)
            else as_bytes(segment)[low:high]
        )
        size = len(part)
        if (
            isinstance(part, Tensor)
            and part.device.type == "cpu"
            and size >= _OWN_WRITE_BYTES
        ):
            if staged is not None and copied > used:
                views.append(memoryview(staged.numpy().data)[used:copied])
                used = copied
            views.append(memoryview(part.numpy().data))
            continue
        staged = buffer.take(stop - start) if staged is None else staged
        target = staged[copied : copied + size]
        copied += size
        if isinstance(part, bytes):
            memoryview(target.numpy().data)[:] = part
        elif part.device.type == "cpu":
            # on this thread only; torch would use all cores from every thread
            np.copyto(target.numpy(), part.numpy())
        else:
            target.copy_(part, non_blocking=True)
            devices.append(part.device)
    if devices:
        finish_copies(set(devices))
    if staged is not None and copied > used:
        views.append(memoryview(staged.numpy().data)[used:copied])
    return views


def skip(views: Sequence[memoryview], count: int) -> list[memoryview]:
    """Return the rest of the views after their first `count` bytes."""
    left = []
    for view in views:
        if count < len(view):
            left.append(view[count:])
        count = max(count - len(view), 0)
    return left


def pieces(views: Sequence[memoryview], size: int) -> Iterator[list[memoryview]]:
    """Yield the views split into pieces of `size` bytes, the last one shorter."""
    piece: list[memoryview] = []
    room = size
    for view in views:
        at = 0
        while at < len(view):
            piece.append(view[at : at + room])
            at += len(piece[-1])
            room -= len(piece[-1])
            if not room:
                yield piece
                piece, room = [], size
    if piece:
        yield piece


def write_files(
    folder: Path, files: Mapping[str, Blob], disk: Disk, threads: int | None = None
) -> dict[str, FileRecord]:
    """Write files chunk by chunk on several threads, and return their records with checksums.

    The files are complete and on the disk when this returns.
    """
    chunks: list[tuple[int, str, Blob, list[int]]] = []
    tensors: list[Tensor] = []
    for name, blob in files.items():
        starts = segment_starts(blob)
        tensors += filter(torch.is_tensor, blob.segments)
        for index in range(-(-blob.size // CHUNK_BYTES)):
            chunks.append((index, name, blob, starts))
    # round-robin over the files, because the system locks a file during a write
    chunks.sort(key=itemgetter(0))
    devices = devices_of(tensors)
    buffer, opened, sums = (
        HostBuffer(bool(devices)),
        dict[str, int](),
        dict[str, list[str]](),
    )

    def write(chunk: tuple[int, str, Blob, list[int]]) -> str:
        return _write_chunk(disk, opened[chunk[1]], chunk, buffer)

    try:
        for name in files:
            opened[name] = disk.create(folder / name)
        with worker_pool(threads or default_threads(), devices, "hasten-write") as pool:
            for (_, name, _, _), digest in zip(
                chunks, pool.map(write, chunks), strict=True
            ):
                sums.setdefault(name, []).append(digest)
            list(pool.map(disk.sync, opened.values()))
    finally:
        for fd in opened.values():
            disk.close(fd)
    records = {}
    for name, blob in files.items():
        records[name] = FileRecord(
            name=name, size=blob.size, sums=tuple(sums.get(name, ()))
        )
    return records


def _write_chunk(
    disk: Disk, fd: int, chunk: tuple[int, str, Blob, list[int]], buffer: HostBuffer
) -> str:
    """Write one chunk of a file and return its checksum."""
    index, _, blob, starts = chunk
    at = start = index * CHUNK_BYTES
    stop = min(start + CHUNK_BYTES, blob.size)
    total = xxhash.xxh3_64()
    for summed in pieces(host_views(blob, start, stop, starts, buffer), SUM_BYTES):
        for view in summed:
            total.update(view)
        for views in pieces(summed, WRITE_BYTES):
            end = at + sum(map(len, views))
            while at < end:
                written = disk.write_at(fd, views, at)
                at += written
                if at < end:
                    views = skip(views, written)
    if stop - start == CHUNK_BYTES:
        start_writeback(fd, start, stop - start)
    return total.hexdigest()


def start_writeback(fd: int, offset: int, length: int) -> None:
    """Ask Linux to start writing these bytes to disk now, so that the final sync has little left to do."""
    if sys.platform == "linux":
        call = getattr(ctypes.CDLL(None), "sync_file_range", None)
        if call is not None:  # a hint only, so a failure is harmless
            call(fd, ctypes.c_int64(offset), ctypes.c_int64(length), _START_WRITEBACK)


def file_checksum(path: Path, start: int, stop: int) -> str:
    """Return the checksum of bytes start..stop of a file. Raises: OSError when the disk cannot read them."""
    with open_outside(path) as file:
        fd = file.fileno()
        if (
            stop - start >= SUM_BYTES
            and (found := _checksum_mapped(fd, start, stop)) is not None
        ):
            return found
        total = xxhash.xxh3_64()
        for at in range(start, stop, SUM_BYTES):
            total.update(os.pread(fd, min(SUM_BYTES, stop - at), at))
        return total.hexdigest()


def _checksum_mapped(fd: int, start: int, stop: int) -> str | None:
    """Return the checksum without copying the bytes; None where the system or the disk does not support it.

    The kernel is asked to load the pages first: a disk error is then a return code instead of a signal.
    """
    if sys.platform != "linux" or start % mmap.ALLOCATIONGRANULARITY:
        return None
    try:
        view = mmap.mmap(fd, stop - start, prot=mmap.PROT_READ, offset=start)
    # the file is shorter than it should be, or cannot be mapped
    except (OSError, ValueError):
        return None
    words = np.frombuffer(view, np.uint8)
    populated: int = ctypes.CDLL(None).madvise(
        ctypes.c_void_p(words.ctypes.data), ctypes.c_size_t(len(words)), _POPULATE_READ
    )
    return checksum(memoryview(words)) if populated == 0 else None  # type: ignore[arg-type]  # arrays are buffers


def read_all(fd: int, views: Sequence[memoryview], offset: int) -> int:
    """Fill the views one after another and return the number of bytes read, fewer only at the end of the file."""
    size = sum(map(len, views))
    done = 0
    while done < size:
        count = os.preadv(fd, views, offset + done)
        if not count:
            break
        done += count
        views = skip(views, count)
    return done


def read_cached(fd: int, views: Sequence[memoryview], offset: int) -> int:
    """Read from the page cache alone; return the number of bytes up to the first that it does not hold."""
    try:
        return os.preadv(fd, views, offset, os.RWF_NOWAIT)
    # nothing is cached, or the system or the file system does not tell
    except (AttributeError, OSError):
        return 0


def read_ahead(fd: int, start: int, stop: int) -> None:
    """Ask the system to read a range into the page cache, all at once, so that the disk reads in parallel."""
    if hasattr(os, "posix_fadvise"):
        for at in range(start, stop, READ_AHEAD_BYTES):
            os.posix_fadvise(
                fd, at, min(READ_AHEAD_BYTES, stop - at), os.POSIX_FADV_WILLNEED
            )


def cannot_write(
    what: str, folder: Path, num_bytes: int, error: OSError
) -> CheckpointError:
    """Return the error for a failed write; if there is no space left, the error names the disk."""
    if error.errno == errno.EFBIG:
        limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
        return CheckpointError(
            f"writing {what} to {folder} failed, because a file of this process may have {limit} bytes at most (ulimit -f): {error}. "
            "Nothing was saved, and earlier files are unchanged. Raise the limit: `ulimit -f unlimited`."
        )
    if error.errno not in FULL:
        return CheckpointError(
            f"{what} could not be written to {folder}: {error}. Nothing was saved, and earlier files are unchanged. Give a folder that can "
            "be written to."
        )
    place = folder.resolve()
    while not place.exists():
        place = place.parent
    mount = place
    while not mount.is_mount():
        mount = mount.parent
    usage = os.statvfs(place)
    free_bytes, size_bytes = (
        usage.f_bavail * usage.f_frsize,
        usage.f_blocks * usage.f_frsize,
    )
    room = f"{free_bytes / 1e6:,.1f} MB of {size_bytes / 1e6:,.1f} MB are free"
    if error.errno == errno.EDQUOT:
        why = "has no room left in your quota"
    elif usage.f_files and not usage.f_favail:
        why = f"has no room for another file: all its {usage.f_files} inodes are in use"
    else:
        why = "is full"
    needed = f"; this rank writes {num_bytes / 1e6:,.1f} MB" if num_bytes else ""
    return CheckpointError(
        f"writing {what} failed, because the disk of {folder} (mounted at {mount}) {why}: {error.strerror or error}. {room}{needed}. "
        "Nothing was saved, and earlier files are unchanged. Delete old checkpoints (total_limit does so automatically), or save to "
        "another disk."
    )
