"""Throughput of a training: tokens a second, and the share of the devices' peak that its operations reach (MFU)."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
from torch import Tensor

from hasten.errors import ConfigError
from hasten.optim.clock import LoaderCursor, StepClock
from hasten.optim.run_part import RunPart
from hasten.optim.window import Holder
from hasten.runtime.context import ProcessContext
from hasten.runtime.hardware import AcceleratorEntry, find_accelerator
from hasten.runtime.mesh_plan import BATCH

log = logging.getLogger(__name__)

# Any in this file: batches of any type.
TokenCount = Callable[[Any], int]
_FIELDS: Final = ("labels", "input_ids")
"""Fields of a batch that hold its tokens, in order of preference."""
_RATE_UPDATES: Final = 32
"""Number of updates over which rates are computed."""


def entry_of(device: torch.device) -> AcceleratorEntry | None:
    """Return the table's entry of a device; None if it is not in the table."""
    if device.type != "cuda":
        return None
    try:
        return find_accelerator(torch.cuda.get_device_name(device))
    except ConfigError:
        return None


class Throughput(RunPart):
    """Tokens a second and MFU of one Accelerator's training, over its last updates; all ranks together."""

    def __init__(
        self,
        ctx: ProcessContext,
        clock: StepClock,
        dtype: str,
        tokens: str | TokenCount | None = None,
        peak_tflops: float | None = None,
        flops_per_token: float | None = None,
    ) -> None:
        for name, value in (
            ("peak_tflops", peak_tflops),
            ("flops_per_token", flops_per_token),
        ):
            if value is not None and not value > 0:
                raise ConfigError(
                    f"track_throughput({name}={value!r}) is not a positive number, so that the share of the peak has no meaning; "
                    "give the device's dense peak in TFLOP/s, the operations of a token, or leave it out."
                )
        self._ctx = ctx
        self._clock = clock
        self._tokens_of = tokens
        self._flops_per_token = flops_per_token
        self.peak_flops = _peak_of(ctx.device, dtype, peak_tflops)
        """Peak of one device in operations a second; None if it is not known."""
        self._marks: deque[tuple[float, int, int]] = deque(maxlen=_RATE_UPDATES)
        self._updates = self._tokens = 0
        self._passes = clock.num_passes
        self._is_batch_counted = False

    # -- values ----------------------------------------------------------------------------------------------------
    @property
    def updates_per_second(self) -> float | None:
        """Updates a second; None before the second update."""
        return self._rate_of(1)

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens a second over all ranks; None before the second update, and for batches without tokens."""
        return self._rate_of(2) or None

    @property
    def mfu(self) -> float | None:
        """Share of the peak; None without `flops_per_token`, and for a device whose peak is not known."""
        rate = self.tokens_per_second
        if rate is None or self._flops_per_token is None or self.peak_flops is None:
            return None
        return rate * self._flops_per_token / (self.peak_flops * self._ctx.world.size)

    def log(self, values: Mapping[str, Any]) -> Mapping[str, Any]:
        """Add tokens a second and MFU to logged values."""
        return {**self.status(), **values}

    def status(self) -> dict[str, float]:
        """Return the known values by the names that trackers get: `tokens_per_second` and `mfu`."""
        values = {"tokens_per_second": self.tokens_per_second, "mfu": self.mfu}
        return {name: value for name, value in values.items() if value is not None}

    def _rate_of(self, column: int) -> float | None:
        if len(self._marks) < 2:
            return None
        first = self._marks[0]
        last = self._marks[-1]
        return (last[column] - first[column]) / max(last[0] - first[0], 1e-9)

    # -- the loop --------------------------------------------------------------------------------------------------
    def attach(self) -> None:
        """Follow the loaders and the updates, behind the parts that are there."""
        self._clock.parts.add(self)
        wants_mfu = self._flops_per_token is not None
        if wants_mfu and self.peak_flops is None and self._ctx.is_main:
            log.info(
                "mfu is not shown: the peak of %s is not in hasten's table; give track_throughput(peak_tflops=)",
                self._ctx.device,
            )

    def detach(self) -> None:
        """End the measurement."""
        self._clock.parts.remove(self)

    def batch(self, cursor: LoaderCursor) -> None:
        """Count the batch that was used for training; drop the rates when an evaluation took time."""
        if self._clock.num_passes != self._passes:
            self._count_batch(cursor)
        else:
            self._marks.clear()
        self._passes = self._clock.num_passes
        self._is_batch_counted = False

    def after_update(self, optimizer: Holder, applied: bool) -> None:
        """Record an update."""
        if (cursor := self._clock.active) is not None:
            self._count_batch(cursor)
        self._updates += 1
        self._marks.append((time.perf_counter(), self._updates, self._tokens))

    def _count_batch(self, cursor: LoaderCursor) -> None:
        if not self._is_batch_counted and cursor.current_batch is not None:
            self._is_batch_counted = True
            self._tokens += cursor.sum_over_ranks(
                self._count_tokens(cursor.current_batch), self._ctx.mesh.size(*BATCH)
            )

    def _count_tokens(self, batch: Any) -> int:
        if callable(self._tokens_of):
            return int(self._tokens_of(batch))
        fields = batch if isinstance(batch, Mapping) else {}
        if self._tokens_of is not None and self._tokens_of not in fields:
            raise ConfigError(
                f"track_throughput(tokens={self._tokens_of!r}) names a field that the batch does not have "
                f"({', '.join(map(str, fields)) or type(batch).__name__}), so its tokens cannot be counted. Name a field with a "
                "tensor of tokens, or give a function of the batch."
            )
        names = _FIELDS if self._tokens_of is None else (self._tokens_of,)
        for name in names:
            tokens = fields.get(name)
            if isinstance(tokens, Tensor):
                return tokens.numel()
        return 0


def _peak_of(
    device: torch.device, dtype: str, peak_tflops: float | None
) -> float | None:
    """Return the given peak, else that of the table for the dtype; None for a device that is not in it."""
    if peak_tflops is not None:
        return peak_tflops * 1e12
    if (entry := entry_of(device)) is None:
        return None
    has_tf32 = torch.get_float32_matmul_precision() != "highest"
    return entry.peak("fp32" if dtype == "no" else dtype, has_tf32)
