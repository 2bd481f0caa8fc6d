"""Parameters on NVMe: one file per parameter with this rank's shard, read when ZeRO-3 gathers the parameter."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn

from hasten.comm.agreement import agree
from hasten.errors import DeviceError, PrepareError
from hasten.optional import need
from hasten.runtime.context import ProcessContext
from hasten.strategies.engines.deepspeed.nvme import remove_with

# Any in this file: DeepSpeed, and the attributes that it adds to parameters, are untyped.
_BLOCK: Final = 4096
"""Alignment of the addresses and lengths of unbuffered reads and writes."""
_SMALLEST: Final = 1024**2
"""Shards of fewer bytes stay in memory."""
_THREADS: Final = 4
_DIRECT: Final = getattr(os, "O_DIRECT", 0)
_HALVES: Final = (("bf16", torch.bfloat16), ("fp16", torch.float16))
_CASTABLE: Final = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
"""Dtypes that an engine converts to its precision."""


@dataclass(frozen=True, slots=True)
class _Part:
    """File of this rank's shard of a parameter."""

    name: str
    path: Path


class ParameterFiles:
    """Files of the shards of at least 1 MiB, which are read when they are needed.

    This is the `param_swapper` of `deepspeed.zero.Init`, which prescribes the names of most methods. DeepSpeed 0.19's swapper
    fails when a model gathers more parameters than it has buffers, writes bfloat16 regardless of the model's precision on
    processors without fp16 instructions, and uses outdated weights that were read ahead of an update.
    """

    def __init__(self, folder: Path, half: torch.dtype | None, *, read_ahead: int, pinned: bool) -> None:
        self.half = half
        """Dtype that the engine converts parameters to; None leaves them unchanged."""
        self._folder, self._read_ahead, self._pinned = folder, read_ahead, pinned
        self._status = need("deepspeed.runtime.swap_tensor.partitioned_param_swapper").PartitionedParamStatus
        self._parts: dict[int, _Part] = {}  # by id of the parameter
        self._held: dict[int, Any] = {}  # parameters whose shard is in memory or being read, by id
        self._rooms: dict[int, Tensor] = {}
        self._reads: dict[int, Future[None]] = {}
        self._shown: set[int] = set()
        self._scratch = torch.empty(0, dtype=torch.uint8)
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="hasten-parameters")

    def reserve(self, named: Iterable[tuple[str, nn.Parameter]], world_size: int) -> None:
        """Create the files in full size, so that no later write finds the drive full. Raises: OSError."""
        for number, (name, parameter) in enumerate(named):
            part = self._parts[id(parameter)] = _Part(name, self._folder / f"{number}.bin")
            share = -(-int(getattr(parameter, "ds_numel", parameter.numel())) // world_size)
            if self.swappable_tensor(numel=share):
                with part.path.open("wb") as file:
                    os.posix_fallocate(file.fileno(), 0, _padded(share * self.dtype_of(parameter).itemsize))

    def dtype_of(self, parameter: Tensor) -> torch.dtype:
        """Return the dtype of a parameter in the engine."""
        return self.half if self.half is not None and parameter.dtype in _CASTABLE else parameter.dtype

    # -- for checkpoints and optimizers ---------------------------------------------------------------------------
    def shown(self, parameter: Any) -> Tensor:
        """Return this rank's shard in memory for the caller to change; `settle` writes it to the file."""
        self._fetch(parameter)
        self._shown.add(id(parameter))
        return _part_of(parameter)

    def copied(self, parameter: Any) -> Tensor:
        """Return this rank's shard for reading."""
        if id(parameter) in self._held:
            self._fetch(parameter)
            return _part_of(parameter)
        part, room = self._room(parameter, parameter.ds_tensor.ds_numel)
        self._read(parameter, room)
        return part

    def settle(self) -> None:
        """Release shards in memory whose parameter is not gathered: those returned by `shown`, and those read ahead but not used.

        DeepSpeed updates the copy in memory if there is one, and discards that copy afterwards.
        """
        self.remove_partition_and_release_buffers(
            [p for p in self._held.values() if p.ds_status.name == "NOT_AVAILABLE"]
        )

    def _fetch(self, parameter: Any) -> None:
        if id(parameter) not in self._held:
            self.swap_in([parameter], async_op=False)
        elif id(parameter) in self._reads:
            self.synchronize_reads()

    # -- called by DeepSpeed ----------------------------------------------------------------------------------------
    def swappable_tensor(self, param: Any = None, numel: int | None = None) -> bool:
        """Return whether a shard is large enough for a file."""
        elements = param.ds_tensor.ds_numel if numel is None else numel
        return bool(elements * (self.half or torch.float32).itemsize >= _SMALLEST)

    def get_buffer(self, param: Any, numel: int) -> Tensor:
        """Return memory for the first write of a shard."""
        return self._take(param, numel)

    def available_swap_in_buffers(self) -> int:
        """Return the number of shards that may still be read ahead."""
        return max(0, self._read_ahead - len(self._held))

    def swap_in(self, params: Sequence[Any], async_op: bool = True, swap_in_buffers: object = None) -> None:
        """Read shards into memory; with `async_op` the reads end at `synchronize_reads`."""
        for param in params:
            self._take(param, param.ds_tensor.ds_numel)
            param.ds_tensor.status = self._status.INFLIGHT
            self._reads[id(param)] = self._threads.submit(self._read, param, self._rooms[id(param)])
        if not async_op:
            self.synchronize_reads()

    def synchronize_reads(self) -> None:
        """Wait for all reads. Raises: DeviceError when one failed."""
        for key, read in list(self._reads.items()):
            read.result()
            del self._reads[key]
            param = self._held[key]
            param.ds_tensor.data = _typed(self._rooms[key], param.ds_tensor)
            param.ds_tensor.status = self._status.AVAILABLE

    def synchronize_writes(self) -> None:
        """Do nothing: writes are synchronous."""

    def swap_out_and_release(self, params: Sequence[Any], **_: object) -> None:
        """Write shards that are in memory, and release them."""
        self._shown.update(id(param) for param in params)
        self.remove_partition_and_release_buffers(params)

    def remove_partition_and_release_buffers(self, params: Sequence[Any]) -> None:
        """Release shards; those returned by `shown` are written first."""
        for param in params:
            key = id(param)
            if key in self._reads:
                self.synchronize_reads()
            room = self._rooms.get(key)
            if key in self._shown and room is not None:
                self._write(param, room)
            self._shown.discard(key)
            self._held.pop(key, None)
            self._rooms.pop(key, None)
            param.ds_tensor.data = torch.empty(0, dtype=param.ds_tensor.dtype)
            param.ds_tensor.status = self._status.NOT_AVAILABLE

    def swap_into_buffer(self, param: Any, dest_buffer: Tensor) -> None:
        """Copy a shard into host memory of DeepSpeed (`max_in_cpu`)."""
        dest_buffer.copy_(self.copied(param))

    def reserve_partitioned_swap_space(self, partition_num_elems: Sequence[int]) -> None:
        """Do nothing: memory for updated shards is allocated when they are written."""

    def swap_out_partitioned_params(self, dst_fp16_params: Sequence[Any], src_fp32_params: Sequence[Tensor]) -> None:
        """Write updated shards, converted to the precision of the parameters."""
        for param, master in zip(dst_fp16_params, src_fp32_params, strict=True):
            dtype = param.ds_tensor.dtype
            size = master.numel() * dtype.itemsize
            if self._scratch.numel() < _padded(size):
                self._scratch = _aligned(_padded(size), self._pinned)
            room = self._scratch.narrow(0, 0, _padded(size))
            room.narrow(0, 0, size).view(dtype).copy_(master.detach())
            self._write(param, room)

    # -- files and memory -----------------------------------------------------------------------------------------
    def _take(self, param: Any, numel: int) -> Tensor:
        part, self._rooms[id(param)] = self._room(param, numel)
        self._held[id(param)] = param
        return part

    def _room(self, param: Any, numel: int) -> tuple[Tensor, Tensor]:
        """Allocate memory for a shard; return the shard and the whole blocks that contain it.

        The memory is not reused for another parameter: in a single process on CPU, parameters and autograd's saved tensors
        share it.
        """
        dtype = param.dtype if param.ds_tensor is None else param.ds_tensor.dtype
        room = _aligned(_padded(numel * dtype.itemsize), self._pinned)
        return room.narrow(0, 0, numel * dtype.itemsize).view(dtype), room

    def _read(self, param: Any, room: Tensor) -> None:
        self._move(param, room, os.O_RDONLY, os.preadv, "read")

    def _write(self, param: Any, room: Tensor) -> None:
        self._move(param, room, os.O_WRONLY, os.pwritev, "written")

    def _move(self, param: Any, room: Tensor, flags: int, move: Callable[..., int], word: str) -> None:
        part, blocks, done = self._parts[id(param)], memoryview(room.numpy().data), 0
        try:
            file = _open(part.path, flags)
            try:
                while done < len(blocks):
                    moved = move(file, [blocks[done:]], done)
                    if not moved:
                        raise OSError(errno.EIO, f"{done} of {len(blocks)} bytes")
                    done += moved
            finally:
                os.close(file)
        except OSError as error:
            raise DeviceError(
                f"this process's part of {part.name} could not be {word} on NVMe ({part.path}: {error}), so training cannot continue "
                "with correct weights. Check the drive of zero_optimization.offload_param.nvme_path, and resume from the last checkpoint."
            ) from error


def place(
    model: nn.Module, init: Callable[..., Any], config: dict[str, Any], folder: Path, ctx: ProcessContext
) -> None:
    """Partition a model with its shards in files of a folder, which is removed together with them. Ranks: every rank.

    `init` is `deepspeed.zero.Init`. Parameters that were partitioned while the model was built are read from host memory.
    Raises: PrepareError if the drive is too full.
    """
    section = config["zero_optimization"]["offload_param"]
    half = next((dtype for name, dtype in _HALVES if config.get(name, {}).get("enabled")), None)
    pinned = bool(section.get("pin_memory")) and ctx.device.type != "cpu"
    files = ParameterFiles(folder, half, read_ahead=int(section.get("buffer_count", 5)), pinned=pinned)
    remove_with(files, folder)
    with agree(ctx.world, "room for parameters on NVMe"):
        try:
            files.reserve(model.named_parameters(), ctx.world.size)
        except OSError as error:
            raise PrepareError(
                f"the parameters of {type(model).__name__} do not fit into {str(folder)!r} ({error}), where "
                "zero_optimization.offload_param stores this process's partition. Free space there, use more processes, or give another "
                "nvme_path."
            ) from error
    partition = init(config_dict_or_path=config, param_swapper=files)
    for parameter in model.parameters():
        if hasattr(parameter, "ds_id"):
            parameter.all_gather()  # type: ignore[attr-defined]  # set by DeepSpeed
        parameter.data = parameter.data.to(ctx.device, files.dtype_of(parameter))
        partition._zero_init_param(parameter)


def _part_of(parameter: Any) -> Tensor:
    found: Tensor = parameter.ds_tensor
    return found


def _padded(size: int) -> int:
    return -(-size // _BLOCK) * _BLOCK


def _aligned(size: int, pinned: bool) -> Tensor:
    """Return a byte tensor whose address is a multiple of the block size."""
    raw = torch.empty(size + _BLOCK, dtype=torch.uint8, pin_memory=pinned)
    room = raw.narrow(0, -raw.data_ptr() % _BLOCK, size)
    room[-_BLOCK:] = 0  # the bytes after the shard are written to the drive too
    return room


def _typed(room: Tensor, like: Any) -> Tensor:
    return room.narrow(0, 0, like.ds_numel * like.dtype.itemsize).view(like.dtype)


def _open(path: Path, flags: int) -> int:
    """Open a file, bypassing the page cache if the file system can: the cache would hold every shard a second time."""
    try:
        return os.open(path, flags | _DIRECT)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return os.open(path, flags)
