"""Two page-locked buffers through which weights pass on their way from files or ordinary memory to a device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

_BUFFERS = 2  # one is read into while the other one is copied from


class Staged:
    """A buffer, and the event after which its last copy is done."""

    def __init__(self, memory: Tensor) -> None:
        self.memory = memory
        self._event: torch.Event | None = None

    def sent(self, stream: torch.Stream | None) -> None:
        """Remember what has been queued on the stream so far as the last use of the buffer."""
        if stream is not None:
            if self._event is None:
                self._event = torch.Event(stream.device)
            self._event.record(stream)

    def wait(self) -> None:
        """Return when the buffer may be written to."""
        if self._event is not None:
            self._event.synchronize()


class Staging:
    """The buffers in turn; made when first used, page-locked if that is possible."""

    def __init__(self, num_bytes: int) -> None:
        self._num_bytes = num_bytes
        self._buffers: list[Staged] = []
        self._turn = 0

    @contextmanager
    def buffer(self, device: torch.device) -> Iterator[Staged]:
        """The next buffer, free to be written to."""
        if not self._buffers:
            self._buffers = [Staged(_memory(self._num_bytes)) for _ in range(_BUFFERS)]
        staged = self._buffers[self._turn % _BUFFERS]
        self._turn += 1
        staged.wait()
        yield staged


def _memory(num_bytes: int) -> Tensor:
    try:
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
    except RuntimeError:  # copies from ordinary memory are slower, and right all the same
        return torch.empty(num_bytes, dtype=torch.uint8)
