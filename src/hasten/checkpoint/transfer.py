"""Bytes between device and host: threads with a stream and a page-locked buffer of their own."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from torch import Tensor

from hasten.checkpoint.format.manifest import CHUNK_BYTES
from hasten.runtime.devices import kind_of


def as_bytes(tensor: Tensor) -> Tensor:
    """A dense tensor as a flat tensor of bytes, without a copy."""
    return tensor.detach().reshape(-1).view(torch.uint8)


def byte_view(tensor: Tensor) -> memoryview:
    """A flat byte tensor on the host as Python sees memory."""
    return memoryview(tensor.numpy().data)


def host_memory(tensor: Tensor, low: int, high: int) -> memoryview:
    """Bytes low..high of a dense tensor on the host, good for as long as the tensor is."""
    return memoryview((ctypes.c_char * (high - low)).from_address(tensor.data_ptr() + low)).cast("B")


def copy_bytes(target: Tensor, source: Tensor) -> None:
    """Copy flat bytes on the host on this thread alone; torch would call on all cores from every thread."""
    np.copyto(target.numpy(), source.numpy())


def is_plain(tensor: Tensor) -> bool:
    """Whether the tensor is consecutive memory that holds its numbers as they are, so that it can be copied as bytes."""
    dense = tensor.layout is torch.strided and tensor.device.type != "meta" and tensor.is_contiguous()
    return dense and not (tensor.is_conj() or tensor.is_neg() or kind_of(tensor.device).lazy)


def devices_of(tensors: Iterable[Tensor]) -> list[torch.device]:
    """The accelerators with streams that the tensors lie on; none when all are on the host."""
    found = dict.fromkeys(tensor.device for tensor in tensors if tensor.device.type != "cpu")
    return [device for device in found if not kind_of(device).lazy]


def worker_pool(threads: int, devices: Sequence[torch.device], name: str) -> ThreadPoolExecutor:
    """Threads that copy, after all work queued so far is done; each has a stream of its own on the first device."""
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
    """One buffer per thread, through which tensors pass chunk by chunk; page-locked where a device takes part."""

    def __init__(self) -> None:
        self._buffer: Tensor | None = None

    def take(self, size: int, pinned: bool) -> Tensor:
        """The first `size` bytes of this thread's buffer."""
        if self._buffer is None or self._buffer.numel() < size or (pinned and not self._buffer.is_pinned()):
            self._buffer = torch.empty(max(size, CHUNK_BYTES), dtype=torch.uint8, pin_memory=pinned)
        return self._buffer[:size]

    def to_host(self, parts: Sequence[bytes | Tensor]) -> memoryview:
        """The parts one after another, in this thread's buffer."""
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
