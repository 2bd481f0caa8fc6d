"""Streams beside the compute stream: work on another stream, and copies of small tensors to the host that block nobody."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch
from torch import Tensor

from hasten.runtime.devices import kind_of


@contextmanager
def on_stream(stream: torch.Stream) -> Iterator[None]:
    """Context manager that makes a stream the current one of its device."""
    before = torch.accelerator.current_stream(stream.device)
    torch.accelerator.set_stream(stream)
    try:
        yield
    finally:
        torch.accelerator.set_stream(before)


class HostCopy:
    """A tensor on its way to the host.

    The copy runs on a stream of its own. On the compute stream, everything after it would wait while the device's copy engine is busy with
    larger copies to the host, such as those of offloaded state.
    """

    def __init__(self, source: Tensor) -> None:
        self._source: Tensor | None = source  # until the copy has read it
        self._event: torch.Event | None = None
        device = source.device
        if source.is_cpu:
            self._values = source
            return
        self._values = torch.empty(source.shape, dtype=source.dtype, pin_memory=device.type == "cuda")
        self._event = torch.Event(device)
        if not kind_of(device).side_streams:
            self._values.copy_(source, non_blocking=True)
            self._event.record()
            return
        stream = _stream_to_host(device)
        stream.wait_stream(torch.accelerator.current_stream(device))
        with on_stream(stream):
            self._values.copy_(source, non_blocking=True)
            self._event.record(stream)

    def is_ready(self) -> bool:
        """Return whether the values have arrived."""
        return self._event is None or self._event.query()

    def wait(self) -> Tensor:
        """Return the values on the host, waiting for their arrival."""
        if self._event is not None:
            self._event.synchronize()
            self._event = None
        self._source = None
        return self._values


@cache  # a device has few streams, and they are never freed
def _stream_to_host(device: torch.device) -> torch.Stream:
    """Return the stream for copies to the host, one for each device."""
    return torch.Stream(device)
