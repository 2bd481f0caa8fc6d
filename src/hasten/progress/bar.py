"""Progress over an iterable: steps, values, rates, memory, time left; displayed by the main process."""

from __future__ import annotations

import atexit
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from operator import mul
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

from torch import Tensor

from hasten import trees
from hasten.errors import ConfigError
from hasten.optim.loader_progress import LoaderCursor
from hasten.optim.run_part import RunParts
from hasten.progress.display import Display, LineDisplay
from hasten.progress.meter import MemoryGauge, Meter, MeterReading
from hasten.progress.scalars import LateScalars
from hasten.progress.straggler import BackwardTimer, StragglerWatch

T = TypeVar("T")
Counter = Callable[[Any], int]  # Any: a batch of any type


@dataclass(frozen=True, slots=True, kw_only=True)
class BarContext:
    """Environment of a progress bar: display, process, memory gauge and straggler detection."""

    display: Display
    is_main: bool = True
    # processes that read different samples; rates are totals over all of them
    replicas: int = 1
    memory: MemoryGauge | None = None
    pulse: BackwardTimer | None = None
    watch: StragglerWatch | None = None
    parts: RunParts = field(default_factory=RunParts)
    """The parts of the run, which give tokens a second and MFU, and get every displayed reading."""


class Progress(Generic[T]):
    """Iterator over an iterable that displays its progress; also usable by hand with `update`.

    Ranks: every rank may use it; only the main one displays anything, the others post their step times.
    """

    def __init__(
        self,
        iterable: Iterable[T] | None = None,
        *,
        here: BarContext,
        total: int | None = None,
        initial: int | None = None,
        desc: str = "",
        samples: Counter | None = None,
        tokens: Counter | None = None,
    ) -> None:
        """Create a progress bar; `samples` and `tokens` count those of a batch, by default its rows and its `input_ids`.

        `initial` is the number of earlier steps; by default the batches that a resumed loader skips.
        """
        self._iterable = iterable
        self._context = here
        self._desc = desc
        self._samples = samples or _num_rows
        self._tokens = tokens or _num_input_ids
        cursor = getattr(iterable, "cursor", None)
        self._cursor = cursor if isinstance(cursor, LoaderCursor) else None
        self._initial = initial
        self._meter = Meter(
            _length_of(iterable) if total is None else total,
            time.perf_counter(),
            initial or 0,
        )
        self._late = LateScalars()
        self._open = True
        self._hint = ""  # of the bar whose steps are slow, not of enclosing bars

    def __len__(self) -> int:
        if self._meter.total is None:
            raise TypeError("this progress has no known length; give total=")
        return self._meter.total

    def __iter__(self) -> Iterator[T]:
        if self._iterable is None:
            raise ConfigError(
                "progress() has no iterable to iterate over; pass one, or call update() directly."
            )
        backward_timer = self._context.pulse
        if backward_timer is not None:
            backward_timer.start_timer()
        if self._initial is None:
            self._meter.begin_at(getattr(self._iterable, "num_done", 0))
        with self:
            for batch in self._iterable:
                yield batch
                self._advance_step(batch)
                if backward_timer is not None:
                    backward_timer.start_timer()

    def show(self, **values: float | str | Tensor) -> None:
        """Display these values beside the bar; a tensor's number appears when it is ready, without waiting."""
        if self._context.is_main:
            self._late.store_values(values)

    def note(self, line: str, unless_in_place: bool = False) -> None:
        """Display a line of text: above the bar, or in the log file; with `unless_in_place`, in the log file only."""
        if self._context.is_main and not (
            unless_in_place and self._context.display.in_place
        ):
            self._context.display.note(line)

    def update(self, steps: int = 1, samples: int = 0, tokens: int = 0) -> None:
        """Count `steps` by hand, with the samples and tokens that this process has seen in them."""
        meter = self._meter
        replicas = self._context.replicas
        meter.step += steps
        meter.samples += samples * replicas
        meter.tokens += tokens * replicas
        self._draw_if_due()
        if self._context.pulse is not None:
            self._context.pulse.start_timer()

    def close(self) -> None:
        """Display the last state; a second call does nothing."""
        atexit.unregister(self.close)
        if self._open:
            self._open = False
            if self._context.is_main:
                last_reading = self._complete_reading(
                    self._meter.read_all(time.perf_counter(), self._desc), wait=True
                )
                self._context.display.close(last_reading)
                for show_reading in self._context.parts.progress:
                    show_reading(self, last_reading, True)

    def __enter__(self) -> Self:
        # a loop left by `break` may end with the process, when nothing can be displayed any more
        atexit.register(self.close)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _advance_step(self, batch: T) -> None:
        if self._context.is_main:
            meter = self._meter
            replicas = self._context.replicas
            cursor = self._cursor
            meter.step += 1
            for_all = mul if cursor is None else cursor.sum_over_ranks
            meter.samples += for_all(self._samples(batch), replicas)
            meter.tokens += for_all(self._tokens(batch), replicas)
        self._draw_if_due()

    def _draw_if_due(self) -> None:
        now_s = time.perf_counter()
        bar_context = self._context
        if bar_context.watch is not None and bar_context.pulse is not None:
            known_straggler = bar_context.watch.found
            bar_context.watch.compare_when_due(now_s, bar_context.pulse)
            # checked again, in a step of this bar
            if bar_context.watch.found is not known_straggler:
                self._hint = str(bar_context.watch.found)
        display = bar_context.display
        if bar_context.is_main and now_s >= display.next_draw_s:
            display.next_draw_s = now_s + display.every_s
            reading = self._complete_reading(self._meter.read(now_s, self._desc))
            display.draw(reading)
            for show_reading in bar_context.parts.progress:
                show_reading(self, reading, False)

    def _complete_reading(
        self, reading: MeterReading, wait: bool = False
    ) -> MeterReading:
        memory = self._context.memory
        straggler_watch = self._context.watch
        status = self._context.parts.read_numbers()
        reading = replace(
            reading,
            tokens_per_s=status.get("tokens_per_second", reading.tokens_per_s),
            mfu=status.get("mfu"),
            values=self._late.read(wait),
        )
        if memory:
            memory_bytes = memory.used_bytes()
            total_bytes = memory.total_bytes
            reading = replace(
                reading, memory_bytes=memory_bytes, memory_total_bytes=total_bytes
            )
        if (
            straggler_watch
            and straggler_watch.found
            and self._shows_hint(straggler_watch)
        ):
            reading = replace(reading, hint=self._hint)
        return reading

    def _shows_hint(self, straggler_watch: StragglerWatch) -> bool:
        """Return whether to display the hint: always in displays that redraw in place, once per rank in log files."""
        if (
            not isinstance(self._context.display, LineDisplay)
            or straggler_watch.found is None
        ):
            return True
        is_new = straggler_watch.found.rank not in straggler_watch.named
        straggler_watch.named.add(straggler_watch.found.rank)
        return is_new


# Any: only its length is used
def _length_of(iterable: Iterable[Any] | None) -> int | None:
    try:
        return len(iterable)  # type: ignore[arg-type]
    except TypeError:  # an iterable without a length
        return None


def _num_rows(batch: Any) -> int:  # Any: a batch of any type
    # the common batch, without a full traversal
    if type(batch) is dict or isinstance(batch, Mapping):
        for value in batch.values():
            if isinstance(value, Tensor) and value.ndim:
                return value.shape[0]
    return trees.batch_size(batch) or 0


def _num_input_ids(batch: Any) -> int:  # Any: a batch of any type
    if type(batch) is not dict and not isinstance(batch, Mapping):
        return 0
    tokens = batch.get("input_ids")
    return tokens.numel() if isinstance(tokens, Tensor) else 0
