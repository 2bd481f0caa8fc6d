"""Throughput of a training: tokens a second, and the share of the devices' peak that its operations reach (MFU).

Operations are counted once, in the second update, from the operators that really run; afterwards an update costs a few additions.
"""

from __future__ import annotations

import logging
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Final

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode
from torch.utils.flop_counter import flop_registry

from hasten.errors import ConfigError
from hasten.optim.clock import LoaderCursor, StepClock
from hasten.optim.run_part import RunPart
from hasten.optim.window import Holder
from hasten.runtime.context import ProcessContext
from hasten.runtime.hardware import AcceleratorEntry, find
from hasten.runtime.mesh_plan import BATCH

log = logging.getLogger(__name__)

# Any in this file: batches of any type, and operators of torch.
TokenCount = Callable[[Any], int]
DTYPES: Final = ("fp8", "bf16", "fp16", "fp32", "other")
_SHORT: Final = MappingProxyType(
    {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
)
_FIELDS: Final = ("labels", "input_ids")
"""Fields of a batch that hold its tokens, in order of preference."""
_SPAN: Final = 32
"""Number of updates over which rates are computed."""


class StepFlops(TorchDispatchMode):
    """Dispatch mode that counts the operations of matrix products, convolutions and attention, by dtype.

    Forward passes that the backward pass repeats (activation checkpointing) are left out: they are no progress.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        self.counted = dict.fromkeys(DTYPES, 0.0)
        self.open = True
        """True while operations are counted."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if any(kind.__name__ == "DTensor" for kind in types):
            return NotImplemented  # counted when it calls operators on this rank's part
        out = func(*args, **kwargs)
        formula = flop_registry.get(getattr(func, "overloadpacket", func))
        if formula is not None and self.open and not _repeats():
            self.counted[_dtype(args)] += float(formula(*args, **kwargs, out_val=out))
        return out

    def leave(self) -> bool:
        """Remove the mode; returns False while another one was entered later, below which it must stay."""
        if _get_current_dispatch_mode() is not self:
            return False
        self.__exit__(None, None, None)  # type: ignore[no-untyped-call]  # torch leaves it untyped
        return True


def _repeats() -> bool:
    """Return whether a forward pass runs inside a backward pass: gradients are recorded there, and not in plain backward passes."""
    return torch.is_grad_enabled() and torch._C._current_graph_task_id() != -1


def _dtype(args: Any) -> str:
    first = next((arg for arg in args if isinstance(arg, Tensor)), None)
    name = "" if first is None else str(first.dtype).removeprefix("torch.")
    return "fp8" if name.startswith("float8") else _SHORT.get(name, "other")


def entry_of(device: torch.device) -> AcceleratorEntry | None:
    """Return the table's entry of a device; None if it is not in the table."""
    if device.type != "cuda":
        return None
    try:
        return find(torch.cuda.get_device_name(device))
    except ConfigError:
        return None


class Throughput(RunPart):
    """Tokens a second and MFU of one Accelerator's training, over its last updates; all ranks together.

    MFU is the time that the counted operations take at the devices' peak, each in its dtype, divided by the time they took.
    """

    def __init__(
        self,
        ctx: ProcessContext,
        clock: StepClock,
        tokens: str | TokenCount | None = None,
        peak_tflops: float | None = None,
        flops_per_token: float | None = None,
        num_optimizers: Callable[[], int] = lambda: 1,
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
        self._ctx, self._clock = ctx, clock
        self._num_optimizers = num_optimizers
        self._tokens_of = tokens
        self._peak_tflops = peak_tflops
        self._entry = None if peak_tflops is not None else entry_of(ctx.device)
        self.flops: dict[str, float] | None = None
        """Operations of an update of every optimizer by dtype, over all ranks; None until they are counted."""
        self.tokens_counted = 0
        """Tokens of the updates whose operations were counted, over all ranks; 0 if batches have none."""
        self._samples_counted = 0
        self._given = flops_per_token
        self._mode: StepFlops | None = None
        self._stance: Any = None
        self._marks: deque[tuple[float, int, int, int]] = deque(maxlen=_SPAN)
        self._updates = self._tokens = self._samples = 0
        # updates, tokens and samples before the counted ones
        self._first_counted = (0, 0, 0)
        self._cycle = 1
        self._passes = clock.num_passes
        self._batch_counted = self._between = False

    # -- values ----------------------------------------------------------------------------------------------------
    @property
    def updates_per_second(self) -> float | None:
        """Updates a second; None before the second update."""
        return self._rate(1)

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens a second over all ranks; None before the second update, and for batches without tokens."""
        return self._rate(2) or None

    @property
    def mfu(self) -> float | None:
        """Share of the peak; None until operations are counted, and for a device whose peak is not known."""
        updates, tokens = self.updates_per_second, self.tokens_per_second
        if self._given is not None:
            seconds = self._peak_seconds({"bf16": self._given})
            return None if seconds is None or tokens is None else seconds * tokens
        if self.flops is None or updates is None:
            return None
        seconds = self._peak_seconds(self.flops)
        if not seconds:
            return None
        samples = self._rate(3)
        if tokens is not None and self.tokens_counted:
            repetitions = tokens / self.tokens_counted
        elif samples and self._samples_counted:
            repetitions = samples / self._samples_counted
        else:
            repetitions = updates / self._cycle
        return seconds * repetitions

    def log(self, values: Mapping[str, Any]) -> Mapping[str, Any]:
        """Add tokens a second and MFU to logged values."""
        return {**self.status(), **values}

    def status(self) -> dict[str, float]:
        """Return the known values by the names that trackers get: `tokens_per_second` and `mfu`."""
        known_values = {"tokens_per_second": self.tokens_per_second, "mfu": self.mfu}
        return {
            name: value for name, value in known_values.items() if value is not None
        }

    def _rate(self, column: int) -> float | None:
        if len(self._marks) < 2:
            return None
        first, last = self._marks[0], self._marks[-1]
        return (last[column] - first[column]) / max(last[0] - first[0], 1e-9)

    def _peak_seconds(self, flops: Mapping[str, float]) -> float | None:
        """Return the time of operations at the peak of all ranks' devices."""
        ranks = self._ctx.world.size
        if self._peak_tflops is not None:
            return sum(flops.values()) / (self._peak_tflops * 1e12 * ranks)
        if self._entry is None:
            return None
        tf32 = torch.get_float32_matmul_precision() != "highest"
        return sum(
            number / (self._entry.peak(dtype, tf32) * ranks)
            for dtype, number in flops.items()
        )

    # -- the loop --------------------------------------------------------------------------------------------------
    def attach(self) -> None:
        """Follow the loaders and the updates, behind the parts that are there."""
        self._clock.parts.add(self)
        if self._entry is None and self._peak_tflops is None and self._ctx.is_main:
            log.info(
                "mfu is not shown: the peak of %s is not in hasten's table; give track_throughput(peak_tflops=)",
                self._ctx.device,
            )

    def detach(self) -> None:
        """End the measurement."""
        self.end()
        self._clock.parts.remove(self)

    def batch(self, cursor: LoaderCursor) -> None:
        """Count the batch that was used for training; drop what an evaluation computed and took."""
        trained = self._clock.num_passes != self._passes
        if trained:
            self._count(cursor)
        else:
            self._marks.clear()
            if self._mode is not None:
                self._mode.counted = dict.fromkeys(DTYPES, 0.0)
        needs_count = self.flops is None and self._given is None and self._mode is None
        if needs_count and trained and self._between and not cursor.at_end:
            self._begin()
        self._passes, self._batch_counted, self._between = (
            self._clock.num_passes,
            False,
            False,
        )

    def after_update(self, optimizer: Holder, applied: bool) -> None:
        """Record an update."""
        if (cursor := self._clock.active) is not None:
            self._count(cursor)
        self._updates += 1
        self._between = True
        mode = self._mode
        if (
            mode is not None
            and mode.open
            and self._updates - self._first_counted[0] >= self._cycle
        ):
            mode.open = False
            self.tokens_counted = self._tokens - self._first_counted[1]
            self._samples_counted = self._samples - self._first_counted[2]
            self._sum(mode)
        if mode is not None and not mode.open:
            self.end()
            self._marks.clear()  # counting has slowed these updates down
        self._marks.append(
            (time.perf_counter(), self._updates, self._tokens, self._samples)
        )

    def end(self) -> None:
        """Stop counting; rates stay readable."""
        if self._mode is not None and self._mode.leave():
            self._mode = None
            if self._stance is not None:
                self._stance.__exit__(None, None, None)
                self._stance = None

    def _count(self, cursor: LoaderCursor) -> None:
        if not self._batch_counted and cursor.given is not None:
            self._batch_counted = True
            self._tokens += cursor.sum_over_ranks(
                self._number(cursor.given), self._ctx.mesh.size(*BATCH)
            )
            self._samples += cursor.num_samples or 0

    def _number(self, batch: Any) -> int:
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
        tokens = next(
            (fields[name] for name in names if isinstance(fields.get(name), Tensor)),
            None,
        )
        return 0 if tokens is None else tokens.numel()

    def _begin(self) -> None:
        """Count until every optimizer has stepped. Code that is not compiled yet stays so for these updates.

        Compiled code keeps running; code that torch would compile under this mode would never be compiled again.
        """
        if "torch._dynamo" in sys.modules:
            self._stance = torch.compiler.set_stance("eager_on_recompile")
        self._first_counted = (self._updates, self._tokens, self._samples)
        self._cycle = max(self._num_optimizers(), 1)
        self._mode = StepFlops()
        self._mode.__enter__()  # type: ignore[no-untyped-call]

    def _sum(self, mode: StepFlops) -> None:
        """Sum the counted operations over ranks, once. Ranks: every rank, in the same update."""
        device = self._ctx.device
        kind = torch.float32 if device.type == "mps" else torch.float64
        own_counts = torch.tensor(
            [mode.counted[name] for name in DTYPES], dtype=kind, device=device
        )
        total = self._ctx.world.all_reduce(own_counts).tolist()
        self.flops = {
            name: number for name, number in zip(DTYPES, total, strict=True) if number
        }
        if not self.flops and self._ctx.is_main:
            log.info(
                "mfu is not shown: no operation of an update has a formula in torch's table; give flops_per_token="
            )
