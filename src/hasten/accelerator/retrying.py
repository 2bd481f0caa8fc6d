"""run_step(): a step that all ranks repeat in smaller micro-batches if memory runs out on any of them.

The protocol, for every step:

1. Each rank runs its passes (forward and backward of one micro-batch after the other). Gradients of earlier micro-steps are set aside,
   so that this step's gradients are separate. Under DDP nothing is reduced yet; under FSDP2 the passes contain collectives.
2. A rank that runs out of memory abandons the pass and repeats it on one sample, and if that fails on none, skipping the
   collectives it had already started, so that every remaining collective is complete. The results of this pass are discarded.
3. All ranks vote. If one has failed, all undo the step (gradients, generators, buffers, the clock) and restart at 1 with
   micro-batches of half the size, which later steps use too.
4. The gradients set aside are added; where a window ends, DDP reduces once.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeVar

import torch
from torch import Tensor, nn

from hasten import trees
from hasten.accelerator.process import bounds
from hasten.comm.collective_log import begun_collectives
from hasten.comm.skipping import SkipBegun
from hasten.errors import ArgumentError, OutOfMemoryError, PeerFailedError, StepError
from hasten.optim.batch_size import should_reduce_batch_size
from hasten.optim.clock import StepClock
from hasten.optim.gradients import SetAside
from hasten.prepare_args import PreparedObjects
from hasten.runtime.context import ProcessContext
from hasten.runtime.devices import empty_cache
from hasten.runtime.logs import get_logger
from hasten.runtime.mesh_plan import Axis
from hasten.state.run_state import Randomness
from hasten.strategies.base import Retry, Strategy
from hasten.trees import Tree
from hasten.trust import memory as memory_picture
from hasten.trust.memory import MemoryReport, measure

log = get_logger(__name__)

R = TypeVar("R")
Split = Callable[[Tree, int, int], Tree]
_FINE, _MEMORY, _OTHER = 0, 1, 2
_INSIDE: Final = (Axis.TP, Axis.CP, Axis.PP)


@dataclass(slots=True)
class _Passes:
    """Results of the passes of one attempt on this rank."""

    values: list[Any] = field(default_factory=list)  # Any: return values of the user's function
    weights: list[Any] = field(default_factory=list)  # Any: numbers, or tensors without dimensions
    error: Exception | None = None
    """An error that was not about memory."""
    report: MemoryReport | None = None
    """Memory report from the moment when memory ran out."""

    @property
    def status(self) -> int:
        return _OTHER if self.error is not None else _FINE if self.report is None else _MEMORY


class Retrying:
    """Runner of the steps of one Accelerator; remembers the largest micro-batch size that fits."""

    def __init__(
        self,
        ctx: ProcessContext,
        strategy: Strategy,
        clock: StepClock,
        prepared: PreparedObjects,
        pictures: Path | None = None,
    ) -> None:
        self.rows: int | None = None
        """Samples of one micro-batch on one rank; None while whole batches fit."""
        self._ctx = ctx
        self._strategy = strategy
        self._clock = clock
        self.prepared = prepared
        self._random = Randomness(ctx.device)
        self._pictures = pictures

    def shown(self, report: MemoryReport) -> str:
        """Return the report as text, with the path of its picture."""
        if self._pictures is None:
            return report.shown()
        try:
            return f"{report.shown()}\n  picture: {memory_picture.save(report, self._pictures, self._ctx.rank)}"
        except OSError as error:  # the text holds the same information
            return f"{report.shown()}\n  picture: none ({error})"

    def run(self, function: Callable[[Any], R], batch: Tree, split: Split | None = None) -> R:
        """Run `function` on the batch and return its results, merged over micro-batches. Ranks: every rank."""
        size = _size_of(batch)
        parts = [retry for model in self.prepared.models for retry in self._retry(model)]
        for part in parts:
            part.begin()
        step = _Step(self, function, batch, size, split or _split, parts)
        count = self._num_passes(size)
        with step.undoable():
            while True:
                done = step.attempt(count)
                if self._settled(done, -(-size // count), step):
                    break
                count = self._num_passes(size)
        step.finish()
        result: R = merged(done.values, done.weights)
        return result

    def _retry(self, model: nn.Module) -> list[Retry]:
        if not any(parameter.requires_grad for parameter in model.parameters()):
            return []
        found = self._strategy.retry(model, self._clock.boundary)
        inside = [f"{axis}_size={self._ctx.mesh.size(axis)}" for axis in _INSIDE if self._ctx.mesh.size(axis) > 1]
        if found is None or inside:
            why = " and ".join(inside) or f"strategy={self._strategy.name!r}"
            raise StepError(
                f"run_step() was called with {why}, where a pass that fails on one rank cannot be finished for the others. Call "
                "backward() without it, and find a batch size that fits with find_executable_batch_size()."
            )
        return [found]

    def _num_passes(self, size: int) -> int:
        """Return the number of passes, the same on every rank, computed from the largest batch of any rank."""
        if self.rows is None:
            return 1
        most = int(self._ctx.world.all_reduce(torch.tensor(size), "max")) if self._ctx.world.size > 1 else size
        return -(-most // self.rows)

    def _settled(self, done: _Passes, rows: int, step: _Step) -> bool:
        """Return whether every rank has succeeded; if not, undo the step on all ranks and set the next size."""
        world = self._ctx.world
        used = step.used() if world.size > 1 else []
        verdict = [done.status, rows, *used]
        if world.size > 1:
            verdict = world.all_reduce(torch.tensor(verdict, dtype=torch.int32), "max").tolist()
        status, rows, step.agreed = verdict[0], verdict[1], [bool(flag) for flag in verdict[2:]]
        if status == _FINE:
            return True
        step.undo()
        report = done.report
        words = None if report is None else self.shown(report) if rows <= 1 else report.summary()
        told: list[str | None] = world.all_gather_object(words)
        reports = {world.ranks[index]: text for index, text in enumerate(told) if text is not None}
        failed = list(reports)
        if done.error is not None:
            raise done.error
        if status == _OTHER:
            raise PeerFailedError(
                f"run_step(): the step failed on another rank{_also(failed)}, and not for lack of memory. This rank stops with it; "
                "see the error there."
            )
        if rows <= 1:
            raise _too_large(reports)
        self.rows = -(-rows // 2)
        if self._ctx.is_main:
            log.warning(
                "memory ran out on %s with %d samples at once; all ranks run this step again in micro-batches of %d, and later "
                "steps too. The update stays that of the whole batch. On rank %d: %s",
                _ranks(failed),
                rows,
                self.rows,
                failed[0],
                reports[failed[0]],
            )
        return False


class _Step:
    """One batch: runs its passes and can undo them."""

    def __init__(
        self,
        owner: Retrying,
        function: Callable[[Any], Any],
        batch: Tree,
        size: int,
        split: Split,
        parts: Sequence[Retry],
    ) -> None:
        self._owner = owner
        self._function = function
        self._batch = batch
        self._size = size
        self._split = split
        self._parts = parts
        self._models = [model for model in owner.prepared.models if any(p.requires_grad for p in model.parameters())]
        self._meets = any(part.meets for part in parts)
        self._alone = owner._ctx.world.size == 1
        self.agreed: list[bool] = []
        """True for each parameter that has a gradient on any rank."""
        trained = dict.fromkeys(p for model in self._models for p in model.parameters() if p.requires_grad)
        self._aside = SetAside(trained)
        self._clock = owner._clock.holding()
        self._random = owner._random.holding()
        self._buffers = [(b, b.detach().clone()) for model in self._models for b in model.buffers()]

    def undoable(self) -> _Undoable:
        """Return a context manager that undoes the step if its block raises."""
        return _Undoable(self)

    @torch.no_grad()
    def undo(self) -> None:
        """Restore the state from the start of the step; the gradients set aside stay there."""
        self._aside.discard()
        self._clock()
        self._random()
        for buffer, kept in self._buffers:
            buffer.copy_(kept)
        for part in self._parts:
            part.put_back()

    def give_up(self) -> None:
        """Restore everything, also after an error in the middle of a pass."""
        for part in self._parts:
            with suppress(StepError):  # torch cannot recover: the error being raised gives the cause
                part.recover()
        self.undo()
        self._aside.put_back()

    def used(self) -> list[int]:
        """Return 1 or 0 for each trained parameter with or without a gradient on this rank; empty if no reduction needs it."""
        if self._meets:
            return []
        return self._aside.present(p for model in self._models for p in model.parameters() if p.requires_grad)

    def finish(self) -> None:
        """Add back the gradients that were set aside, and synchronise where a window ends. Ranks: every rank."""
        self._aside.add()
        at = 0
        for model, part in zip(self._models, self._parts, strict=True):
            count = sum(p.requires_grad for p in model.parameters())
            part.reduce(self.agreed[at : at + count])
            at += count

    def attempt(self, count: int) -> _Passes:
        """Run the batch in `count` passes."""
        clock, done = self._owner._clock, _Passes()
        try:
            for index in range(count):
                start, stop = bounds(self._size, index, count)
                alive = done.status == _FINE
                clock.begin_part((stop - start) / self._size if alive else 0.0, first=index == 0)
                micro = self._micro(start, stop) if alive and stop > start else self._micro(0, 1)
                with ExitStack() as quiet:
                    for part in self._parts:
                        quiet.enter_context(part.quiet(index == count - 1))
                    self._pass(micro, done)
                if alive and stop > start and clock.weights.part is not None:
                    weight = clock.weights.part.weight
                    done.weights.append(clock.weights.part.share if weight is None else weight)
                elif alive and done.values:
                    done.values.pop()  # this pass only took part in the collectives of other ranks
        finally:
            clock.weights.part = None
        return done

    def _micro(self, start: int, stop: int) -> Tree:
        return self._batch if (start, stop) == (0, self._size) else self._split(self._batch, start, stop)

    def _pass(self, micro: Tree, done: _Passes) -> None:
        """Run forward and backward of one micro-batch; errors are recorded in `done`."""
        device = self._owner._ctx.device
        rewind = (
            self._owner._clock.holding()
        )  # the first weighted loss of a run is a collective: it must be the first again
        begun = {} if self._alone else begun_collectives(device.type)
        try:
            value = self._function(micro)
        except Exception as raised:  # every kind is reported to the other ranks; only a lack of memory is not raised
            if not should_reduce_batch_size(raised):
                if self._meets:
                    raise
                done.error = done.error or raised
                return
            words = f"{type(raised).__name__}: {raised}".splitlines()[0]
        else:
            done.values.append(value)
            return
        # The exception is released here, and with it the frames that held the activations.
        report = measure(words, self._models, self._owner.prepared.optimizers, device)
        done.report = done.report or report
        if not self._pass_again(1, begun, rewind, report) and not self._pass_again(0, begun, rewind):
            raise _too_large({self._owner._ctx.rank: self._owner.shown(report)})

    def _pass_again(
        self, rows: int, before: dict[str, int], rewind: Callable[[], None], report: MemoryReport | None = None
    ) -> bool:
        """Repeat the pass on one sample or none, for the collectives of other ranks; return whether no rank is left waiting.

        The collectives started since `before` are skipped. Without samples a pass needs hardly any memory; models that cannot run it
        are refused.
        """
        device = self._owner._ctx.device
        now = {} if self._alone else begun_collectives(device.type)
        for part in self._parts:
            part.recover()
        _free(device)
        rewind()
        begun = {name: count - before.get(name, 0) for name, count in now.items()}
        self._owner._clock.begin_part(0.0, first=False)
        with ExitStack() as around:
            if report is not None:
                around.enter_context(report.activations(self._models))
            around.enter_context(torch.compiler.set_stance("force_eager"))
            if not self._alone:
                around.enter_context(SkipBegun(begun))
            try:
                self._function(self._micro(0, rows))
            except Exception as raised:  # of any kind; relevant is only whether other ranks wait for this pass
                if self._meets and rows and not should_reduce_batch_size(raised):
                    raise
                return not self._meets
        return True


class _Undoable:
    def __init__(self, step: _Step) -> None:
        self._step = step

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None:
            self._step.give_up()


def merged(values: Sequence[Any], weights: Sequence[Any]) -> Any:  # Any: return values of the user's function
    """Return the results of micro-batches as one: rows concatenated, means averaged by weight, counts added."""
    detached = [trees.map_tensors(Tensor.detach, value) for value in values]
    if len(detached) == 1:
        return detached[0]
    total = sum(weights[1:], start=weights[0])

    def merge(*found: Any) -> Any:
        first = found[0]
        if isinstance(first, Tensor) and first.ndim:
            return torch.cat(found)
        is_mean = first.is_floating_point() if isinstance(first, Tensor) else isinstance(first, float)
        if is_mean:
            return sum(value * (weight / total) for value, weight in zip(found, weights, strict=True))
        counts = isinstance(first, Tensor) or type(first) is int
        return sum(found) if counts else first

    leaves = zip(*(trees.leaves(value) for value in detached), strict=True)
    joined = iter([merge(*found) for found in leaves])
    return trees.map_leaves(lambda _: next(joined), detached[0])


def _split(batch: Tree, start: int, stop: int) -> Tree:
    size = trees.batch_size(batch)
    assert size is not None, "the batch has rows"
    return trees.take_samples(batch, slice(start, stop), size)


def _size_of(batch: Tree) -> int:
    size = trees.batch_size(batch)
    if not size:
        raise ArgumentError(
            "run_step(batch) got a batch without a tensor that has rows, so that it cannot be divided into micro-batches. Give "
            "tensors whose first dimension counts the samples, in any nesting of dicts, lists, tuples and dataclasses."
        )
    return size


def _free(device: torch.device) -> None:
    gc.collect()
    empty_cache(device)


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _also(ranks: Sequence[int]) -> str:
    return f" (while memory ran out on {_ranks(ranks)})" if ranks else ""


def _too_large(reports: dict[int, str]) -> OutOfMemoryError:
    shown = "\n".join(f"rank {rank}:\n{report}" for rank, report in reports.items())
    error = OutOfMemoryError(
        f"memory ran out on {_ranks(list(reports))} with one sample at a time, so the step cannot be made any smaller. Use shorter "
        f"samples, recompute activations (recompute=), shard over more devices (strategy='fsdp'), or a smaller model.\n{shown}",
        shown,
    )
    error.agreed = True
    return error
