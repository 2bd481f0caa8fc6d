"""Resharding on load: copies that fill any slice of a tensor from pieces written in another layout, run in parallel (FSDP's and ZeRO's shards alike)."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from hasten.checkpoint.base import Slice
from hasten.checkpoint.format.formats import MappedFile, Piece
from hasten.checkpoint.format.manifest import CHUNK_BYTES
from hasten.checkpoint.store.disk import (
    HostBuffer,
    as_bytes,
    copy_bytes,
    devices_of,
    finish_copies,
    host_memory,
    is_plain,
    read_all,
    worker_pool,
)
from hasten.errors import CheckpointError, CorruptCheckpointError, OtherModelError

_MAX_READ_BYTES = CHUNK_BYTES
"""Most bytes of a read; a power of two, as torch page-locks memory in these."""
# a smaller gap between two tensors is read and discarded rather than skipped
_MAX_GAP_BYTES = 65536
_MAX_TENSORS_PER_READ = (
    400  # a read fills at most 1024 buffers, and every tensor may need two
)


@dataclass(frozen=True, slots=True)
class Copy:
    """One copy: a piece of memory to fill, from one piece of a file."""

    target: Tensor
    source: Tensor
    file: MappedFile | None = None

    def find_offset(self) -> int | None:
        """Return the offset of the bytes in the file, if they can be read from it without conversion."""
        target = self.target
        source = self.source
        if (
            self.file is None
            or type(target) is not Tensor
            or not is_plain(target)
            or not source.is_contiguous()
            or target.dtype != source.dtype
        ):
            return None
        file_offset = source.data_ptr() - self.file.address
        return file_offset if 0 <= file_offset < self.file.size else None


Region = tuple[tuple[int, int], ...]  # (start, length) per dim


def intersect_boxes(
    offset: Sequence[int],
    shape: Sequence[int],
    other_offset: Sequence[int],
    other_shape: Sequence[int],
) -> Region | None:
    """Return the intersection of two boxes of a global tensor, in global coordinates; None when it is empty."""
    region = []
    for first_start, first_length, second_start, second_length in zip(
        offset, shape, other_offset, other_shape, strict=True
    ):
        start = max(first_start, second_start)
        stop = min(first_start + first_length, second_start + second_length)
        if start >= stop:
            return None
        region.append((start, stop - start))
    return tuple(region)


def plan_copies(
    tensor_name: str, target: Tensor | Slice, pieces: Sequence[Piece]
) -> list[Copy]:
    """Return the copies that fill a live tensor (or a rank's slice of one) from the pieces in a checkpoint.

    Raises: OtherModelError when the shape differs; CorruptCheckpointError when a region is in no file.
    """
    live_tensor = target.data if isinstance(target, Slice) else target.detach()
    if isinstance(target, Slice):
        global_shape = target.shape
        global_offset = target.offset
    else:
        global_shape = tuple(live_tensor.shape)
        global_offset = (0,) * live_tensor.dim()
    for piece in pieces:
        if piece.shape != global_shape:
            raise OtherModelError(
                f"{tensor_name} has shape {tuple(global_shape)} here and {tuple(piece.shape)} in the checkpoint. Nothing was loaded. "
                "Build the model as it was when it was saved, or load with strict=False to leave this tensor out."
            )
    if live_tensor.numel() == 0:
        return []
    if live_tensor.device.type == "meta":
        raise CheckpointError(
            f"{tensor_name} is on the meta device, where there is no memory to load into. Nothing was loaded. Give the model "
            "memory first (prepare it, or call to_empty)."
        )
    # the common case, without computing overlaps
    if len(pieces) == 1 and pieces[0].data.shape == live_tensor.shape == global_shape:
        return [Copy(live_tensor, pieces[0].data, pieces[0].file)]
    copies = []
    num_filled = 0
    for piece in pieces:
        region = intersect_boxes(
            global_offset,
            tuple(live_tensor.shape),
            piece.offset,
            tuple(piece.data.shape),
        )
        if region is None:
            continue
        copies.append(
            Copy(
                _narrow_to_region(live_tensor, region, global_offset),
                _narrow_to_region(piece.data, region, piece.offset),
                piece.file,
            )
        )
        num_filled += copies[-1].target.numel()
    if num_filled != live_tensor.numel():
        raise CorruptCheckpointError(
            f"{tensor_name}: the files hold {num_filled} of the {live_tensor.numel()} numbers this rank needs, so parts of the tensor are "
            "missing (or stored twice). Nothing was loaded. If machines do not share a disk, copy all rank files "
            "into one folder."
        )
    return copies


def _narrow_to_region(tensor: Tensor, region: Region, offset: Sequence[int]) -> Tensor:
    for dim, ((start, length), region_base) in enumerate(
        zip(region, offset, strict=True)
    ):
        if length != tensor.shape[dim]:
            tensor = tensor.narrow(dim, start - region_base, length)
    return tensor


def join_pieces(pieces: Sequence[Piece], tensor_name: str) -> Tensor:
    """Return the global tensor on the CPU; a view of the mapped file when a single piece covers it."""
    first_piece = pieces[0]
    if len(pieces) == 1 and tuple(first_piece.data.shape) == tuple(first_piece.shape):
        return first_piece.data
    global_tensor = torch.empty(first_piece.shape, dtype=first_piece.data.dtype)
    for copy in plan_copies(tensor_name, global_tensor, pieces):
        copy.target.copy_(copy.source)
    return global_tensor


@dataclass(slots=True)
class _FileRange:
    """A byte range of a file and the tensors to fill from it: (offset in the file, target, its bytes from..to).

    What a thread needs is computed before the threads start: each call of torch makes a thread wait for all others that run Python code.
    """

    file: MappedFile
    start: int
    end: int
    targets: list[tuple[int, Tensor, int, int]] = field(default_factory=list)
    devices: list[torch.device] = field(default_factory=list)
    device_parts: list[tuple[int, int, Tensor]] = field(default_factory=list)
    """Bytes from..to of the range, and the part of a target to copy them to, if a target is on a device."""

    def prepare_device_copies(self) -> None:
        """Compute what depends on all targets, if any tensor is on a device."""
        self.devices = devices_of([target for _, target, _, _ in self.targets])
        for offset, target, low, high in self.targets if self.devices else ():
            start = offset - self.start
            self.device_parts.append(
                (start, start + high - low, as_bytes(target)[low:high])
            )

    def copy_from(self, staged_bytes: Tensor) -> None:
        """Start the copies from a buffer that holds the range, and wait for them."""
        for low, high, device_part in self.device_parts:
            if high - low == staged_bytes.numel():
                source = staged_bytes
            else:
                source = staged_bytes[low:high]
            device_part.copy_(source, non_blocking=True)
        finish_copies(self.devices)


def run_copies(copies: Sequence[Copy], threads: int | None = None) -> None:
    """Fill live tensors on any device with several threads, about one chunk at a time.

    Raises: CheckpointError when a file can no longer be read; the tensors are then in an undefined state, which the
    caller must undo.
    """
    target_tensors = []
    source_tensors = []
    for copy in copies:
        target_tensors.append(copy.target)
        source_tensors.append(copy.source)
    devices = devices_of([*target_tensors, *source_tensors])
    copy_groups, file_ranges = _group_copies(copies)
    for file_range in file_ranges if devices else ():
        file_range.prepare_device_copies()
    host_buffer = HostBuffer(bool(devices))
    copy_jobs: list[Future[None]] = []
    try:
        with worker_pool("hasten-read", devices, threads) as thread_pool:
            for copy_group in copy_groups:
                copy_jobs.append(
                    thread_pool.submit(_copy_group, copy_group, host_buffer)
                )
            for file_range in file_ranges:
                copy_jobs.append(
                    thread_pool.submit(_fill_range, file_range, host_buffer)
                )
            for copy_job in copy_jobs:
                copy_job.result()
    except RuntimeError as error:
        raise CheckpointError(
            f"copying a tensor from the checkpoint failed: {error}"
        ) from error
    finally:
        increment_version(target_tensors)  # as an in-place operation of torch does


def _group_copies(copies: Sequence[Copy]) -> tuple[list[list[Copy]], list[_FileRange]]:
    """Return the copies in parts of about one chunk: byte ranges to read in file order, and groups of other copies."""
    copy_groups: list[list[Copy]] = []
    file_places: list[tuple[str, int, int, int]] = []
    group_bytes = 0
    for copy_index, copy in enumerate(copies):
        target_bytes = copy.target.nbytes
        file_offset = copy.find_offset()
        if copy.file is not None and file_offset is not None:
            file_places.append(
                (str(copy.file.path), file_offset, copy_index, target_bytes)
            )
            continue
        if not copy_groups or group_bytes >= CHUNK_BYTES:
            copy_groups.append([])
            group_bytes = 0
        copy_groups[-1].append(copy)
        group_bytes += target_bytes
    file_ranges: list[_FileRange] = []
    for _, file_offset, copy_index, target_bytes in sorted(file_places):
        mapped_file = copies[copy_index].file
        target = copies[copy_index].target
        assert mapped_file is not None, "only copies from a file are read"
        for low in range(0, target_bytes, _MAX_READ_BYTES):
            read_start = file_offset + low
            high = min(low + _MAX_READ_BYTES, target_bytes)
            last_range = file_ranges[-1] if file_ranges else None
            if (
                last_range is None
                or mapped_file is not last_range.file
                or not 0 <= read_start - last_range.end < _MAX_GAP_BYTES
                or file_offset + high - last_range.start > _MAX_READ_BYTES
                or len(last_range.targets) >= _MAX_TENSORS_PER_READ
            ):
                last_range = _FileRange(mapped_file, read_start, read_start)
                file_ranges.append(last_range)
            last_range.targets.append((read_start, target, low, high))
            last_range.end = file_offset + high
    return copy_groups, file_ranges


@torch.no_grad()
def _copy_group(copies: Sequence[Copy], host_buffer: HostBuffer) -> None:
    target_tensors = []
    for copy in copies:
        target = copy.target
        source = copy.source
        target_tensors.append(target)
        if (
            target.device.type == "cpu"
            and source.device.type != "cpu"
            and _needs_buffer(target, source)
        ):
            _copy_to_host(target, source, host_buffer)
        else:
            target.copy_(source)
    finish_copies(devices_of(target_tensors))


def _needs_buffer(target: Tensor, source: Tensor) -> bool:
    """Return True for a plain copy from an accelerator, which is faster through page-locked memory."""
    is_same = target.dtype == source.dtype and target.shape == source.shape
    return (
        is_same and bool(devices_of([source])) and is_plain(target) and is_plain(source)
    )


def _copy_to_host(target: Tensor, source: Tensor, host_buffer: HostBuffer) -> None:
    target = as_bytes(target)
    source = as_bytes(source)
    for low in range(0, source.numel(), CHUNK_BYTES):
        source_part = source[low : low + CHUNK_BYTES]
        staged_bytes = host_buffer.take(source_part.numel())
        staged_bytes.copy_(source_part, non_blocking=True)
        finish_copies([source.device])
        copy_bytes(target[low : low + source_part.numel()], staged_bytes)


@torch.no_grad()
def _fill_range(file_range: _FileRange, host_buffer: HostBuffer) -> None:
    """Read a range and copy it to its tensors; from the mapping, if the file has lost its name."""
    descriptor = file_range.file.open_again()
    range_bytes = file_range.end - file_range.start
    if descriptor is None:
        for offset, target, low, high in file_range.targets:
            as_bytes(target)[low:high].copy_(
                file_range.file.data[offset : offset + high - low]
            )
        finish_copies(file_range.devices)
        return
    views: list[memoryview] = []
    staged_bytes: Tensor | None = None
    if file_range.devices:
        staged_bytes = host_buffer.take(range_bytes)
        views.append(staged_bytes.numpy().data)
    else:
        # the tensors' memory; gaps between them go to the buffer
        reached_offset = file_range.start
        for offset, target, low, high in file_range.targets:
            if offset > reached_offset:
                gap = host_buffer.take(offset - reached_offset)
                views.append(gap.numpy().data)
            views.append(host_memory(target, low, high))
            reached_offset = offset + high - low
    try:
        num_read = read_all(descriptor, views, file_range.start)
    except OSError as error:
        raise CheckpointError(
            f"{file_range.file.path}: cannot be read any more ({error}). Check the disk, and load this or another checkpoint."
        ) from error
    finally:
        os.close(descriptor)
    if num_read != range_bytes:
        raise CorruptCheckpointError(
            f"{file_range.file.path}: {num_read} of {range_bytes} bytes at {file_range.start} could be read, so it was cut off while "
            "it was being loaded. Load another checkpoint."
        )
    if staged_bytes is not None:
        file_range.copy_from(staged_bytes)
