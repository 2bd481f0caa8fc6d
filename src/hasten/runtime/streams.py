"""Copies beside the compute stream, between host and device; only events order them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from threading import get_ident
from typing import Any

import torch
from torch import Tensor

from hasten.runtime.devices import kind_of

Pairs = Iterable[tuple[Tensor, Tensor]]
"""Targets with their sources."""
Mark = Any  # an event of the device; None where work is finished when a call returns


@contextmanager
def on_stream(stream: torch.Stream) -> Iterator[None]:
    """Context manager that makes a stream the current one of its device."""
    outer_stream = torch.accelerator.current_stream(stream.device)
    torch.accelerator.set_stream(stream)
    try:
        yield
    finally:
        torch.accelerator.set_stream(outer_stream)


class HostLanes:
    """Copies on devices without side streams, such as the CPU: each is finished when it returns."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def follow_current_stream(self) -> None:
        """Take the current stream as the compute stream."""

    def empty(self, num_bytes: int, outlives_copies: bool = False) -> Tensor:
        """Allocate device memory in the order of the compute stream.

        Once freed, it is reused by the compute stream at once, or with `outlives_copies` after all copies to the device.
        """
        return torch.empty(num_bytes, dtype=torch.uint8, device=self.device)

    def grow(self, memory: Tensor, num_bytes: int) -> None:
        """Allocate the storage of a tensor anew, in the order of the compute stream."""
        memory.untyped_storage().resize_(num_bytes)

    def mark(self) -> Mark:
        """Return the mark of the compute stream's work so far."""
        return None

    def fetch(self, pairs: Pairs, *after: Mark) -> Mark:
        """Queue copies to the device, after the given marks; return their mark."""
        for target_tensor, source_tensor in pairs:
            target_tensor.copy_(source_tensor)

    def store(self, pairs: Pairs) -> Mark:
        """Queue copies to the host, after the compute stream's work so far; return their mark."""
        for target_tensor, source_tensor in pairs:
            target_tensor.copy_(source_tensor)

    def compute_waits(self, mark: Mark) -> None:
        """Make later work of the compute stream wait for a mark."""

    def host_waits(self, mark: Mark) -> None:
        """Block until the work before a mark is done."""


class DeviceLanes(HostLanes):
    """Streams of an accelerator: one for copies to the device, one for copies to the host."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._arriving = torch.Stream(device)
        self._leaving = torch.Stream(device)
        self._compute = torch.accelerator.current_stream(device)

    def follow_current_stream(self) -> None:
        self._compute = torch.accelerator.current_stream(self.device)

    def empty(self, num_bytes: int, outlives_copies: bool = False) -> Tensor:
        with on_stream(self._compute):
            memory = torch.empty(num_bytes, dtype=torch.uint8, device=self.device)
        if outlives_copies:
            memory.record_stream(self._arriving)
        return memory

    def grow(self, memory: Tensor, num_bytes: int) -> None:
        with on_stream(self._compute):
            memory.untyped_storage().resize_(num_bytes)

    def mark(self) -> Mark:
        return _record_event(self._compute)

    def fetch(self, pairs: Pairs, *after: Mark) -> Mark:
        return _queue_copies(pairs, self._arriving, after)

    def store(self, pairs: Pairs) -> Mark:
        return _queue_copies(pairs, self._leaving, (self.mark(),))

    def compute_waits(self, mark: Mark) -> None:
        if mark is not None:
            self._compute.wait_event(mark)

    def host_waits(self, mark: Mark) -> None:
        if mark is not None:
            mark.synchronize()


def _record_event(stream: torch.Stream) -> torch.Event:
    event = torch.Event(stream.device)
    event.record(stream)
    return event


def _queue_copies(
    pairs: Pairs, stream: torch.Stream, after: Iterable[Mark]
) -> torch.Event:
    for mark in after:
        if mark is not None:
            stream.wait_event(mark)
    with on_stream(stream):
        for target_tensor, source_tensor in pairs:
            target_tensor.copy_(source_tensor, non_blocking=True)
    return _record_event(stream)


def lanes_for(device: torch.device) -> HostLanes:
    """Return new copy lanes of a device."""
    if kind_of(device).side_streams:
        return DeviceLanes(device)
    return HostLanes(device)


class HostCopy:
    """A tensor on its way to the host.

    The copy runs on a stream of its own. On the compute stream, everything after it would wait while the device's copy engine is busy with
    larger copies to the host, such as those of offloaded state.
    """

    def __init__(self, source_tensor: Tensor) -> None:
        self._source: Tensor | None = source_tensor  # until the copy has read it
        self._values = source_tensor
        self._arrived: Mark = None
        if not source_tensor.is_cpu:
            copy_lanes = _lanes_of_thread(source_tensor.device, get_ident())
            copy_lanes.follow_current_stream()
            self._values = torch.empty(
                source_tensor.shape,
                dtype=source_tensor.dtype,
                pin_memory=source_tensor.is_cuda,
            )
            self._arrived = copy_lanes.store([(self._values, source_tensor)])

    def is_ready(self) -> bool:
        """Return whether the values have arrived."""
        return self._arrived is None or bool(self._arrived.query())

    def wait(self) -> Tensor:
        """Return the values on the host, waiting for their arrival."""
        if self._arrived is not None:
            self._arrived.synchronize()
            self._arrived = None
        self._source = None
        return self._values


@cache  # streams are never freed
def _lanes_of_thread(device: torch.device, thread_id: int) -> HostLanes:
    """Return the lanes for copies by one thread, which has a current stream of its own."""
    return lanes_for(device)
