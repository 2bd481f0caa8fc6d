"""Profiling a block with torch.profiler, one Chrome trace per rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import profiler

from hasten.config.tracking import ProfileKwargs
from hasten.errors import ConfigError
from hasten.runtime.context import ProcessContext


@contextmanager
def profile(config: ProfileKwargs, ctx: ProcessContext) -> Iterator[profiler.profile]:
    """A block under torch.profiler; with `output_trace_dir`, a trace `rank_<n>.json` is left there.

    With a schedule, each finished cycle leaves a trace of its own. Ranks: each for itself.
    """
    folder = Path(config.output_trace_dir) if config.output_trace_dir else None
    schedule = profiler.schedule(**config.schedule_option) if config.schedule_option else None
    ready = config.on_trace_ready
    if ready is None and folder is not None and schedule is not None:
        ready = _trace_writer(folder, ctx.rank)
    with profiler.profile(
        activities=_activities(config),
        schedule=schedule,
        on_trace_ready=ready,
        record_shapes=config.record_shapes,
        profile_memory=config.profile_memory,
        with_stack=config.with_stack,
        with_flops=config.with_flops,
        with_modules=config.with_modules,
    ) as running:
        yield running
    if folder is not None and schedule is None:
        folder.mkdir(parents=True, exist_ok=True)
        running.export_chrome_trace(str(folder / f"rank_{ctx.rank}.json"))


def _trace_writer(folder: Path, rank: int) -> Callable[[profiler.profile], None]:
    def write(running: profiler.profile) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        running.export_chrome_trace(str(folder / f"rank_{rank}_step_{running.step_num}.json"))

    return write


def _activities(config: ProfileKwargs) -> list[Any]:  # Any: torch's ProfilerActivity is an untyped C enum
    here: set[Any] = profiler.supported_activities()  # type: ignore[no-untyped-call]  # torch leaves it untyped
    if config.activities is None:
        return sorted(here, key=str)
    names = {str(activity).rpartition(".")[2].lower(): activity for activity in here}
    missing = [name for name in config.activities if name not in names]
    if missing:
        raise ConfigError(
            f"ProfileKwargs(activities={config.activities}) asks for {missing[0]!r}, which this torch cannot record "
            f"here; it can record {', '.join(sorted(names))}."
        )
    return [names[name] for name in config.activities]
