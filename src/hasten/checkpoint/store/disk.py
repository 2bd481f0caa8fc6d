"""System calls of a local save, in one file so that tests can simulate a crash at each of them."""

from __future__ import annotations

import bisect
import ctypes
import errno
import fcntl
import itertools
import mmap
import os
import shutil
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

import numpy as np
import torch
from torch import Tensor

from hasten.checkpoint.base import Blob
from hasten.checkpoint.format.manifest import (
    BLOCK_BYTES,
    CHUNK_BYTES,
    Checksum,
    ColumnChecksum,
    FileRecord,
    Summing,
    checksum,
)
from hasten.checkpoint.store.outside_files import open_outside
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
    return memoryview((ctypes.c_char * (high - low)).from_address(tensor.data_ptr() + low)).cast("B")


def copy_bytes(target: Tensor, source: Tensor) -> None:
    """Copy flat bytes on the host on the calling thread only; torch would use all cores from every thread."""
    np.copyto(target.numpy(), source.numpy())


def is_plain(tensor: Tensor) -> bool:
    """Return True if the tensor is contiguous memory with its values unmodified, so that it can be copied as bytes."""
    dense = tensor.layout is torch.strided and tensor.device.type != "meta" and tensor.is_contiguous()
    return dense and not (tensor.is_conj() or tensor.is_neg() or kind_of(tensor.device).lazy)


def devices_of(tensors: Iterable[Tensor]) -> list[torch.device]:
    """Return the accelerators with streams that hold any of the tensors; empty when all are on the host."""
    found = dict.fromkeys(tensor.device for tensor in tensors if tensor.device.type != "cpu")
    return [device for device in found if not kind_of(device).lazy]


def worker_pool(threads: int, devices: Sequence[torch.device], name: str) -> ThreadPoolExecutor:
    """Return a thread pool for copies after synchronizing the devices; threads have separate streams on the first."""
    for device in devices:
        torch.accelerator.synchronize(device)
    if not devices:
        return ThreadPoolExecutor(threads, thread_name_prefix=name)
    return ThreadPoolExecutor(threads, thread_name_prefix=name, initializer=_own_stream, initargs=(devices[0],))


def finish_copies(devices: Iterable[torch.device]) -> None:
    """Wait for the copies this thread has started."""
    for device in devices:
        torch.accelerator.current_stream(device).synchronize()


def _own_stream(device: torch.device) -> None:
    torch.accelerator.set_stream(torch.Stream(device))


class HostBuffer(threading.local):
    """One buffer per thread for copying tensors chunk by chunk; page-locked if a device is involved."""

    def __init__(self) -> None:
        self._buffer: Tensor | None = None

    def take(self, size: int, pinned: bool) -> Tensor:
        """Return the first `size` bytes of this thread's buffer."""
        if self._buffer is None or self._buffer.numel() < size or (pinned and not self._buffer.is_pinned()):
            self._buffer = torch.empty(max(size, CHUNK_BYTES), dtype=torch.uint8, pin_memory=pinned)
        return self._buffer[:size]

    def to_host(self, parts: Sequence[bytes | Tensor]) -> memoryview:
        """Copy the parts one after another into this thread's buffer and return it."""
        sizes = [len(part) if isinstance(part, bytes) else part.numel() for part in parts]
        devices = devices_of(part for part in parts if isinstance(part, Tensor))
        buffer, at = self.take(sum(sizes), bool(devices)), 0
        for part, size in zip(parts, sizes, strict=True):
            if isinstance(part, bytes):
                byte_view(buffer)[at : at + size] = part
            elif part.device.type == "cpu":
                copy_bytes(buffer[at : at + size], part)
            else:
                buffer[at : at + size].copy_(part, non_blocking=True)
            at += size
        finish_copies(devices)
        return byte_view(buffer)


SUM_BYTES = 2 * 1024**2
"""Bytes checksummed before they are written: few enough to stay in the processor's cache, and enough that threads
rarely wait for each other between calls."""
WRITE_BYTES = 512 * 1024
"""Bytes per write call, which is the page size in the system's cache. Large pages are cheap to map when they are
read again; still larger ones are returned by a virtual machine to its host when they are free, and requesting
them again costs several times as much as writing."""
FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
"""Error codes for lack of space: on the disk, in the user's quota, or within the limit for a file."""
_OWN_WRITE_BYTES = 65536
_START_WRITEBACK = 2  # SYNC_FILE_RANGE_WRITE
_POPULATE_READ = 22  # MADV_POPULATE_READ, since Linux 5.14


def default_threads() -> int:
    """Return the number of threads for reading and writing: one per core, at least 2 and at most 16."""
    return max(2, min(16, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 2))


class Disk:
    """Thin, overridable wrappers of system calls; every change of the disk goes through this class."""

    def create(self, path: Path) -> int:
        """Return a descriptor of a new, empty file."""
        return os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | getattr(os, "O_CLOEXEC", 0), 0o666)

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

    def put_lock(self, draft: Path, path: Path, content: Callable[[bool], bytes]) -> int:
        """Return a descriptor of a new lock file, which appears after it is written and, if supported, locked."""
        fd = os.open(draft, os.O_CREAT | os.O_EXCL | os.O_RDWR | getattr(os, "O_CLOEXEC", 0), 0o644)
        try:
            os.write(fd, content(_flock(fd)))
            draft.rename(path)
        except BaseException:
            os.close(fd)
            draft.unlink(missing_ok=True)
            raise
        return fd


def _flock(fd: int) -> bool:
    """Return True if the file system granted the lock."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:  # no flock here: heartbeats are used instead
        return False
    return True


def chunk_parts(blob: Blob, start: int, stop: int, starts: Sequence[int]) -> list[bytes | Tensor]:
    """Return the pieces of the segments that make up bytes start..stop of the file."""
    parts: list[bytes | Tensor] = []
    index = max(bisect.bisect_right(starts, start) - 1, 0)
    while index < len(blob.segments) and starts[index] < stop:
        segment, base = blob.segments[index], starts[index]
        length = len(segment) if isinstance(segment, bytes) else segment.numel() * segment.element_size()
        low, high = max(start - base, 0), min(stop - base, length)
        if low < high:
            parts.append(segment[low:high] if isinstance(segment, bytes) else as_bytes(segment)[low:high])
        index += 1
    return parts


def segment_starts(blob: Blob) -> list[int]:
    """Return the offset of every segment in the file."""
    starts, at = [], 0
    for segment in blob.segments:
        starts.append(at)
        at += len(segment) if isinstance(segment, bytes) else segment.numel() * segment.element_size()
    assert at == blob.size, f"segments hold {at} bytes, the blob says {blob.size}"
    return starts


def host_views(parts: Sequence[bytes | Tensor], buffer: HostBuffer) -> list[memoryview]:
    """Return the parts in host memory: large host tensors are used directly, all others are copied to the buffer."""
    scattered = [part for part in parts if not _stays(part)]
    gathered = buffer.to_host(scattered) if scattered else memoryview(b"")
    views: list[memoryview] = []
    at = 0
    for in_place, run in itertools.groupby(parts, _stays):
        if in_place:
            views += [byte_view(part) for part in run if isinstance(part, Tensor)]
        else:
            size = sum(len(part) for part in run)
            views.append(gathered[at : at + size])
            at += size
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


def _stays(part: bytes | Tensor) -> bool:
    """Return True if a part is large enough for a separate write."""
    return isinstance(part, Tensor) and part.device.type == "cpu" and part.numel() >= _OWN_WRITE_BYTES


class BlobWriter:
    """Writer of files, chunk by chunk on several threads, computing checksums along the way."""

    def __init__(self, disk: Disk, threads: int | None = None) -> None:
        self._disk = disk
        self._threads = threads or default_threads()

    def write(self, folder: Path, files: Mapping[str, Blob]) -> dict[str, FileRecord]:
        """Write and sync files; they are complete and on the disk when this returns."""
        buffer = HostBuffer()
        opened: dict[str, int] = {}
        try:
            for name in files:
                opened[name] = self._disk.create(folder / name)
            segments = (segment for blob in files.values() for segment in blob.segments)
            devices = devices_of(segment for segment in segments if isinstance(segment, Tensor))
            with worker_pool(self._threads, devices, "hasten-write") as pool:
                jobs = self._jobs(files, opened, buffer)
                sums = dict(pool.map(lambda job: job(), jobs))
                list(pool.map(self._disk.sync, opened.values()))
        finally:
            for fd in opened.values():
                self._disk.close(fd)
        return {
            name: FileRecord(
                name=name,
                size=blob.size,
                sums=tuple(sums[name, i] for i in range(-(-blob.size // CHUNK_BYTES))),
            )
            for name, blob in files.items()
        }

    def _jobs(
        self, files: Mapping[str, Blob], opened: Mapping[str, int], buffer: HostBuffer
    ) -> list[Callable[[], tuple[tuple[str, int], str]]]:
        """Return one job per chunk, round-robin over the files, because the system locks a file during a write."""
        numbered = []
        for name, blob in files.items():
            starts = segment_starts(blob)
            for index in range(-(-blob.size // CHUNK_BYTES)):
                numbered.append((index, name, blob, starts))
        numbered.sort(key=lambda item: item[0])

        def job(index: int, name: str, blob: Blob, starts: list[int]) -> Callable[[], tuple[tuple[str, int], str]]:
            return lambda: ((name, index), self._chunk(opened[name], blob, starts, index, buffer))

        return [job(*item) for item in numbered]

    def _chunk(self, fd: int, blob: Blob, starts: Sequence[int], index: int, buffer: HostBuffer) -> str:
        start = index * CHUNK_BYTES
        stop = min(start + CHUNK_BYTES, blob.size)
        total, at = Checksum(), start
        for summed in pieces(host_views(chunk_parts(blob, start, stop, starts), buffer), SUM_BYTES):
            for view in summed:
                total.update(view)
            for written in pieces(summed, WRITE_BYTES):
                at += self._write_all(fd, written, at)
        start_writeback(fd, start, stop - start)
        return total.digest()

    def _write_all(self, fd: int, views: Sequence[memoryview], offset: int) -> int:
        done = 0
        while views:
            written = self._disk.write_at(fd, views, offset + done)
            done, views = done + written, skip(views, written)
        return done


def start_writeback(fd: int, offset: int, length: int) -> None:
    """Ask Linux to start writing these bytes to disk now, so that the final sync has little left to do."""
    if sys.platform == "linux" and length >= CHUNK_BYTES:
        call = getattr(ctypes.CDLL(None), "sync_file_range", None)
        if call is not None:  # a hint only, so a failure is harmless
            call(fd, ctypes.c_int64(offset), ctypes.c_int64(length), _START_WRITEBACK)


class ChunkReader(threading.local):
    """Reader that computes checksums of files, through one small buffer per thread that stays in the cache."""

    def __init__(self) -> None:
        # not a bytearray: zeroing it would hold the interpreter lock
        self._view = memoryview(np.empty(16 * BLOCK_BYTES, np.uint8).data)

    def checksum(self, path: Path, start: int, stop: int, kind: type[Checksum | ColumnChecksum] = Checksum) -> str:
        """Return the checksum of bytes start..stop of a file. Raises: OSError when the disk cannot read them."""
        with open_outside(path) as file:
            found = _checksum_mapped(file.fileno(), start, stop, kind)
            return found if found is not None else self._checksum_read(file.fileno(), start, stop, kind())

    def _checksum_read(self, fd: int, start: int, stop: int, total: Summing) -> str:
        at = start
        while at < stop:
            wanted = min(len(self._view), stop - at)
            count = read_all(fd, [self._view[:wanted]], at)
            total.update(self._view[:count])
            at += wanted
        return total.digest()


def _checksum_mapped(fd: int, start: int, stop: int, kind: type[Checksum | ColumnChecksum]) -> str | None:
    """Return the checksum without copying the bytes; None where the system or the disk does not support it.

    The kernel is asked to load the pages first: a disk error is then a return code instead of a signal.
    """
    if sys.platform != "linux" or stop - start < SUM_BYTES or start % mmap.ALLOCATIONGRANULARITY:
        return None
    try:
        view = mmap.mmap(fd, stop - start, prot=mmap.PROT_READ, offset=start)
    except (OSError, ValueError):  # the file is shorter than it should be, or cannot be mapped
        return None
    words = np.frombuffer(view, np.uint8)
    populated: int = ctypes.CDLL(None).madvise(
        ctypes.c_void_p(words.ctypes.data), ctypes.c_size_t(len(words)), _POPULATE_READ
    )
    return checksum(memoryview(words), kind) if populated == 0 else None  # type: ignore[arg-type]  # arrays are buffers


def read_all(fd: int, views: Sequence[memoryview], offset: int) -> int:
    """Fill the views one after another and return the number of bytes read, fewer only at the end of the file."""
    done = 0
    while views:
        count = os.preadv(fd, views, offset + done)
        if not count:
            break
        done, views = done + count, skip(views, count)
    return done


def cannot_write(what: str, folder: Path, num_bytes: int, error: OSError) -> CheckpointError:
    """Return the error for a failed write; if there is no space left, the error names the disk."""
    if error.errno not in FULL:
        return CheckpointError(
            f"{what} could not be written to {folder}: {error}. Nothing was saved, and what was there before stays. Give a folder that can "
            "be written to."
        )
    mount = folder.resolve()
    while not os.path.ismount(mount) and mount != mount.parent:
        mount = mount.parent
    try:
        usage = shutil.disk_usage(folder)
        room = f"{usage.free / 1e6:,.1f} MB of {usage.total / 1e6:,.1f} MB are free"
    except OSError:  # the folder was removed, or the file system does not report free space
        room = "how much is free cannot be found out"
    needed = f"; this rank writes {num_bytes / 1e6:,.1f} MB" if num_bytes else ""
    why = "allows no larger file (ulimit -f)" if error.errno == errno.EFBIG else "is full"
    return CheckpointError(
        f"writing {what} failed, because the disk of {folder} (mounted at {mount}) {why}: "
        f"{error.strerror or error}. {room}{needed}. Nothing was saved, and what was there before stays. Delete old checkpoints "
        "(total_limit does it by itself), or save to another disk."
    )
