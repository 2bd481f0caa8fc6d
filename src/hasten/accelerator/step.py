"""Methods of a step: accumulate() marks micro-batches, gather_for_metrics() drops padding, profile() traces a block."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn, profiler

from hasten import trees
from hasten.comm import ops
from hasten.comm.base import Comm
from hasten.config.sections.loop import ProfileKwargs
from hasten.errors import (
    ArgumentError,
    ConfigError,
    DataError,
    HastenWarning,
    MismatchError,
    StepError,
)
from hasten.optim.clock import LoaderCursor, StepClock
from hasten.runtime.context import ProcessContext
from hasten.strategies.base import Strategy
from hasten.trees import Tree


class Accumulation:
    """Context manager for the micro-steps of the same models, reused for each of them.

    It is a class whose instance is reused, because a generator, or a new object for every micro-step, would cost more than
    the rest of the step's overhead.
    """

    __slots__ = ("_clock", "_hidden", "_models", "_quiet", "_strategy", "_syncs")

    def __init__(
        self,
        clock: StepClock,
        strategy: Strategy,
        models: tuple[nn.Module, ...],
        sync_each_batch: bool,
    ) -> None:
        self._clock = clock
        self._strategy = strategy
        self._models = models
        self._syncs = strategy.caps.synchronises and not sync_each_batch
        self._hidden = strategy.caps.hides_gradients
        self._quiet: AbstractContextManager[object] | None = None

    def __enter__(self) -> None:
        clock = self._clock
        if clock.is_inside:
            raise StepError(
                "accumulate() was entered inside an accumulate() block; one micro-step would count twice and the update would come too early. "
                "Remove the inner block, and name all models in the outer one: accumulate(first, second)."
            )
        boundary = clock.tick(self._models)
        clock.is_inside = True
        # Optimizers that share a window must see the gradients of every backward.
        if boundary or not self._syncs or (self._hidden and clock.shares_open_window):
            return
        if len(self._models) == 1:  # the common case, without the cost of an ExitStack
            sync_pause: AbstractContextManager[object] = self._strategy.no_sync(
                self._models[0]
            )
            sync_pause.__enter__()
        else:
            sync_pause = stack = ExitStack()
            for model in self._models:
                stack.enter_context(self._strategy.no_sync(model))
        self._quiet = sync_pause

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._clock.is_inside = False
        sync_pause = self._quiet
        if sync_pause is not None:
            self._quiet = None
            sync_pause.__exit__(kind, error, trace)
        if error is not None:
            self._clock.roll_back_micro_step()
            if isinstance(error, torch.OutOfMemoryError):
                self._add_memory_report(error)

    def _add_memory_report(self, error: torch.OutOfMemoryError) -> None:
        """Add a note to the error that says what the memory of this rank is used for."""
        from hasten.trust.memory import memory_report  # only for an error

        device = next(
            parameter.device
            for model in self._models
            for parameter in model.parameters()
        )
        error.add_note(memory_report(self._models, self._clock.holders(), device))


@dataclass(frozen=True, slots=True)
class _Unclear:
    """Placeholder sent by a rank that cannot separate its results from padding."""

    reason: str


def gather_for_metrics(
    data: Any,
    comm: Comm,
    cursor: LoaderCursor | None,
    objects: bool = False,
    dim: int | None = None,
) -> Any:
    """Return the rows of every rank's current batch, without padding rows.

    `cursor` is the loader being iterated, or None outside a loop over one. `dim` is the dimension of the samples, by default
    the first. Any: tensors in any nesting, or objects. Ranks: every rank that reads different samples.
    Raises: DataError when a padded batch's results have no whole number of rows for each of its samples.
    """
    if objects or not trees.tensors(data):
        if dim is not None:
            raise ArgumentError(
                f"gather_for_metrics(dim={dim!r}) was given objects, which have no dimensions, so dim would have no effect. "
                "Pass tensors, or leave dim out."
            )
        return _gather_items(data, comm, cursor)
    try:
        rows = real_rows(_samples_first(data, dim), cursor, warn=dim is None)
    except (ArgumentError, DataError):
        _send_mismatch(comm)
        raise
    gathered = ops.gather_ragged(rows, comm)
    if not dim:
        return gathered
    return trees.map_tensors(lambda tensor: tensor.movedim(0, dim), gathered)


def _samples_first(data: Tree, dim: int | None) -> Tree:
    if not dim:
        return data

    def move_samples_first(tensor: Tensor) -> Tensor:
        if not -tensor.ndim <= dim < tensor.ndim:
            raise ArgumentError(
                f"gather_for_metrics(dim={dim}) was given a tensor of shape {tuple(tensor.shape)}, which has no such dimension, so "
                "its samples cannot be found. Gather tensors with different layouts in separate calls."
            )
        return tensor.movedim(dim, 0).contiguous()

    return trees.map_tensors(move_samples_first, data)


def real_rows(data: Tree, cursor: LoaderCursor | None, warn: bool = False) -> Tree:
    """Return the tree without the padding rows of the current batch; with `warn`, ambiguous layouts cause a warning."""
    if cursor is None or cursor.num_real is None:
        return data

    def cut_padding(tensor: Tensor) -> Tensor:
        rows = tensor.reshape(1) if tensor.ndim == 0 else tensor
        if warn:
            _check_layout(rows, cursor)
        return rows[: num_real(rows.shape[0], cursor)]

    return trees.map_tensors(cut_padding, data)


def _check_layout(tensor: Tensor, cursor: LoaderCursor) -> None:
    """Warn if a later dimension could hold the samples as well; raise if only a later dimension could."""
    num_real_rows = cursor.num_real
    rows = cursor.num_rows
    if (
        not num_real_rows
        or rows is None
        or num_real_rows == rows
        or rows not in tensor.shape[1:]
    ):
        return
    other_dim = 1 + tuple(tensor.shape[1:]).index(rows)
    ambiguity = f"gather_for_metrics() got a tensor of shape {tuple(tensor.shape)} for a batch of {rows} samples of which {num_real_rows} are real"
    if tensor.shape[0] % rows:
        raise DataError(
            f"{ambiguity}: the samples are in dimension {other_dim}, not in the first, and cutting the first would drop real results. "
            f"Pass dim={other_dim}."
        )
    warnings.warn(
        f"{ambiguity}: both dimension 0 and dimension {other_dim} could be the samples. Dimension 0 was taken; if that is wrong, real "
        f"results were dropped and repeated ones counted. Pass dim=0 or dim={other_dim} to say which.",
        HastenWarning,
        stacklevel=2,
    )


def num_real(length: int, cursor: LoaderCursor) -> int:
    """Return the number of a result's rows that belong to real samples: one or more for each, or one for the whole batch.

    Raises: DataError if real rows cannot be distinguished from padding.
    """
    num_real_rows = cursor.num_real
    rows = cursor.num_rows
    if num_real_rows is None or length == 0:
        return length
    # one number for the whole batch: dropped where the batch is all padding
    if num_real_rows == 0 or length == 1:
        return min(num_real_rows, length)
    # batches without planned rows: either all of them are real or none
    if rows is None:
        return length
    if length % rows:
        raise DataError(
            f"gather_for_metrics() got {length} rows for a batch of {rows} samples of which {num_real_rows} are real; it cannot "
            f"tell which rows belong to padding, and counting them would bias the metric. Pass results with one row, "
            f"or a fixed number of rows, for each sample, or use even_batches=False."
        )
    return length // rows * num_real_rows


# Any: the caller's objects
def _gather_items(data: Any, comm: Comm, cursor: LoaderCursor | None) -> Any:
    if isinstance(data, list):
        local_items = data
    elif isinstance(data, tuple):
        local_items = list(data)
    else:
        local_items = [data]
    if cursor is not None and cursor.num_real is not None:
        try:
            local_items = local_items[: num_real(len(local_items), cursor)]
        except DataError as error:
            ops.gather_object([_Unclear(str(error))], comm)
            raise
    gathered = ops.gather_object(local_items, comm)
    for item in gathered:
        if isinstance(item, _Unclear):
            raise DataError(f"on another rank, {item.reason}")
    return gathered


def _send_mismatch(comm: Comm) -> None:
    """Make the ranks that wait for this rank's rows raise MismatchError, by sending a different structure."""
    try:
        ops.gather_ragged(
            {
                "rows that cannot be told from padding": torch.zeros(
                    1, device=comm.device
                )
            },
            comm,
        )
    except MismatchError:
        return


@contextmanager
def profile(config: ProfileKwargs, ctx: ProcessContext) -> Iterator[profiler.profile]:
    """Context manager that runs its block under torch.profiler; with `output_trace_dir`, it writes `rank_<n>.json` there.

    With a schedule, each finished cycle writes a separate trace. Ranks: any, each independently.
    """
    trace_folder = Path(config.output_trace_dir) if config.output_trace_dir else None
    if config.schedule_option:
        schedule = profiler.schedule(**config.schedule_option)
    else:
        schedule = None
    ready = config.on_trace_ready
    if ready is None and trace_folder is not None and schedule is not None:
        ready = _trace_writer(trace_folder, ctx.rank)
    with profiler.profile(
        activities=_profiler_activities(config),
        schedule=schedule,
        on_trace_ready=ready,
        record_shapes=config.record_shapes,
        profile_memory=config.profile_memory,
        with_stack=config.with_stack,
        with_flops=config.with_flops,
        with_modules=config.with_modules,
    ) as profiler_run:
        yield profiler_run
    if trace_folder is not None and schedule is None:
        trace_folder.mkdir(parents=True, exist_ok=True)
        profiler_run.export_chrome_trace(str(trace_folder / f"rank_{ctx.rank}.json"))


def _trace_writer(trace_folder: Path, rank: int) -> Callable[[profiler.profile], None]:
    def write_trace(profiler_run: profiler.profile) -> None:
        trace_folder.mkdir(parents=True, exist_ok=True)
        profiler_run.export_chrome_trace(
            str(trace_folder / f"rank_{rank}_step_{profiler_run.step_num}.json")
        )

    return write_trace


# Any: torch's ProfilerActivity is an untyped C enum
def _profiler_activities(config: ProfileKwargs) -> list[Any]:
    supported_activities: set[Any] = profiler.supported_activities()  # type: ignore[no-untyped-call]  # torch leaves it untyped
    if config.activities is None:
        return sorted(supported_activities, key=str)
    names = {
        str(activity).rpartition(".")[2].lower(): activity
        for activity in supported_activities
    }
    missing = [name for name in config.activities if name not in names]
    if missing:
        raise ConfigError(
            f"ProfileKwargs(activities={config.activities}) asks for {missing[0]!r}, which this torch cannot record "
            f"here; it can record {', '.join(sorted(names))}."
        )
    return [names[name] for name in config.activities]
