"""The two streams of a device that take part in streaming, copying and computing, and how they wait for each other."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

Mark = Any  # an event of the device; opaque to whoever passes it on


class Lanes:
    """A stream for copies beside the one that computes, which is whatever stream is current at the moment."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.copies = torch.Stream(device)

    def memory(self, num_bytes: int) -> Tensor:
        """Device memory that copies may write to, from now until it is given back."""
        with torch.inference_mode(False):
            memory = torch.empty(num_bytes, dtype=torch.uint8, device=self.device)
        memory.record_stream(self.copies)  # when it is freed, others get it only after copies that are under way
        self.copies.wait_stream(self._computing())  # whoever used this memory before
        return memory

    def mark(self) -> Mark:
        """A mark that can be set in one lane and waited for in the other."""
        return torch.Event(self.device)

    def copy(self, pairs: Iterable[tuple[Tensor, Tensor]], ready: Mark) -> None:
        """Queue copies of sources to targets, and set `ready` when they are done."""
        before = self._computing()
        torch.accelerator.set_stream(self.copies)
        try:
            for target, source in pairs:
                target.copy_(source, non_blocking=True)
            ready.record(self.copies)
        finally:
            torch.accelerator.set_stream(before)

    def set_after_computing(self, done: Mark) -> None:
        """Set the mark when everything that has been queued for computing so far is done."""
        done.record(self._computing())

    def copies_wait(self, done: Mark) -> None:
        """Let copies that are queued from now on wait for a mark."""
        self.copies.wait_event(done)

    def computing_waits(self, ready: Mark) -> None:
        """Let computations that are queued from now on wait for a mark."""
        self._computing().wait_event(ready)

    def finish(self) -> None:
        """Return when the device has nothing left to do."""
        torch.accelerator.synchronize(self.device)

    def _computing(self) -> torch.Stream:
        return torch.accelerator.current_stream(self.device)
