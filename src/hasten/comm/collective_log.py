"""Record of the latest collective of this process, with the line of the user's code that called it."""

from __future__ import annotations

import contextlib
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import torch
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

LIBRARIES: Final = (
    f"{Path(__file__).parents[1]}/",
    f"{Path(torch.__file__).parent}/",
    f"{Path(contextlib.__file__).parent}/",
)
"""Folders of hasten, torch and the standard library, whose frames are not the user's code."""


@dataclass(frozen=True, slots=True)
class LoggedStep:
    """One collective."""

    op: str
    shape: tuple[int, ...] | None
    dtype: torch.dtype | None
    file: str
    line: int
    at_s: float
    """Start time on the monotonic clock."""


@dataclass(slots=True, weakref_slot=True, eq=False)
class CollectiveRecord:
    """Record of the latest collective, written by the training thread and read by the watchdog when a rank waits for long."""

    count: int = 0
    turns: Counter[str] = field(default_factory=Counter)
    """Number of barriers of each group so far, which use the store, so that torch does not count them."""
    block: str = ""
    """Name of the active block, such as main_process_first, in which this rank may keep the others waiting."""
    spent_s: float = 0.0
    """Time that this process has spent in finished collectives."""
    _last: tuple[str, torch.Size | None, torch.dtype | None, str, int, float] | None = (
        None
    )

    def note(self, op: str, tensor: Tensor | None = None, group: str = "") -> None:
        """Record a collective that is about to run."""
        self.count += 1
        if group:
            self.turns[group] += 1
        source_file, source_line = calling_line(2)
        shape, dtype = (None, None) if tensor is None else (tensor.shape, tensor.dtype)
        self._last = (op, shape, dtype, source_file, source_line, time.monotonic())

    def note_end(self) -> None:
        """Record the return of the latest collective."""
        if self._last is not None:
            self.spent_s += time.monotonic() - self._last[5]

    @property
    def last(self) -> LoggedStep | None:
        """The latest collective."""
        if (last_fields := self._last) is None:
            return None
        op, shape, dtype, source_file, source_line, at_s = last_fields
        return LoggedStep(
            op,
            None if shape is None else tuple(shape),
            dtype,
            source_file,
            source_line,
            at_s,
        )

    @contextmanager
    def extend_patience(self, block: str) -> Iterator[None]:
        """Context manager in which the other ranks wait for this rank without a timeout."""
        outer_block = self.block
        self.block = block
        try:
            yield
        finally:
            self.block = outer_block


def calling_line(frame_depth: int) -> tuple[str, int]:
    """Return file and line of the innermost frame of the user's code, at least `depth` frames up."""
    frame = sys._getframe(frame_depth)
    while frame.f_code.co_filename.startswith(LIBRARIES) and frame.f_back is not None:
        frame = frame.f_back
    return frame.f_code.co_filename, frame.f_lineno


def count_collectives(device_type: str) -> dict[str, int]:
    """Return the number of collectives so far by group and device type, as `name/cpu`, counted from each group's creation."""
    counts_by_group: dict[str, int] = {}
    for group, group_name in dict(c10d._world.pg_names).items():
        for backend_device in {"cpu", device_type}:
            try:
                backend = group._get_backend(torch.device(backend_device))
                num_collectives = backend._get_sequence_number_for_group()  # type: ignore[attr-defined]  # not in the stub
            # the group has no backend for this device, or was destroyed
            except RuntimeError:
                continue
            counts_by_group[f"{group_name}/{backend_device}"] = num_collectives
    return counts_by_group
