"""Construction of a Progress from the context of an Accelerator."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeVar

from rich.console import Console

from hasten.optim.run_part import RunParts
from hasten.progress.bar import BarContext, Counter, Progress
from hasten.progress.display import Display, DisplayMaker, error_console
from hasten.progress.meter import MemoryGauge
from hasten.progress.straggler import BackwardTimer, StragglerWatch
from hasten.runtime.context import ProcessContext
from hasten.runtime.mesh_plan import BATCH

T = TypeVar("T")


class ProgressMaker:
    """Factory of the progress bars of one Accelerator, which share a console, a timer of backward passes and a straggler watch."""

    def __init__(self, ctx: ProcessContext, run_parts: RunParts) -> None:
        self._ctx = ctx
        self._parts = run_parts
        self.pulse = BackwardTimer(ctx.device)
        run_parts.add(self.pulse)
        self._watch = straggler_watch(ctx)
        # one for all bars: nested bars share the screen
        self._console = error_console()
        self._make_display = DisplayMaker(self._console, is_main=ctx.topology.rank == 0)

    # Any: options of `progress`
    def __call__(self, iterable: Iterable[T] | None, **options: Any) -> Progress[T]:
        if options.get("console") is None and options.get("every_s") is None:
            options["display"] = self._make_display()
        options = {"console": self._console, "run_parts": self._parts, **options}
        return make_progress(
            iterable, ctx=self._ctx, pulse=self.pulse, watch=self._watch, **options
        )


def straggler_watch(
    ctx: ProcessContext, every_s: float = 10.0
) -> StragglerWatch | None:
    """Return a straggler watch over the ranks of the world, or None with a single rank or without a store."""
    # not part of Comm: only the straggler hint needs it
    store = getattr(ctx.world, "store", None)
    if ctx.world.size < 2 or store is None:
        return None
    return StragglerWatch(store, ctx.world.rank, ctx.world.size, every_s)


def make_progress(
    iterable: Iterable[T] | None,
    *,
    ctx: ProcessContext,
    total: int | None = None,
    initial: int | None = None,
    desc: str = "",
    samples: Counter | None = None,
    tokens: Counter | None = None,
    every_s: float | None = None,
    console: Console | None = None,
    display: Display | None = None,
    pulse: BackwardTimer | None = None,
    watch: StragglerWatch | None = None,
    run_parts: RunParts | None = None,
) -> Progress[T]:
    """Return a progress bar over `iterable` for this process.

    The Accelerator notifies `pulse` when a backward pass starts; without it there are no straggler hints.
    """
    is_main = ctx.topology.rank == 0
    bar_context = BarContext(
        display=display
        or DisplayMaker(console or error_console(), is_main=is_main, every_s=every_s)(),
        is_main=is_main,
        replicas=ctx.mesh.size(*BATCH),
        memory=MemoryGauge(ctx.device) if is_main else None,
        pulse=pulse,
        watch=watch,
        parts=run_parts or RunParts(),
    )
    return Progress(
        iterable,
        here=bar_context,
        total=total,
        initial=initial,
        desc=desc,
        samples=samples,
        tokens=tokens,
    )
