"""What loaders and optimizers tell whoever measures the parts of a step."""

from __future__ import annotations

from typing import Protocol


class StepMarks(Protocol):
    """Told where a training step stands; each call takes the time since the one before."""

    def asked(self) -> None:
        """The loop asks its loader for the next batch."""
        ...

    def got(self, num_samples: int) -> None:
        """The loader hands a batch out, of so many samples over all ranks."""
        ...

    def optimizer_begins(self) -> None:
        """An optimizer begins an update."""
        ...

    def optimizer_done(self) -> None:
        """An optimizer has tried an update."""
        ...

    def skipped(self) -> None:
        """The update was skipped: gradients overflowed."""
        ...
