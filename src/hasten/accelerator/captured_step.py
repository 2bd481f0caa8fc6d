"""capture_step(): a training step that runs as one CUDA graph where possible, and as the plain function elsewhere.

Each replay of a captured step makes the same calls on the device, but its Python code does not run again. This module therefore
updates the Accelerator's counters on the host (updates, losses to check, passes of a step) after each replay.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import update_wrapper
from typing import Any, Final, Generic, ParamSpec, TypeVar

import torch
from torch import Tensor

from hasten import trees
from hasten.optim import fused
from hasten.optim.clock import StepClock
from hasten.optim.optimizer import PreparedOptimizer
from hasten.optim.step_graph import StepGraph
from hasten.prepare_args import PreparedObjects
from hasten.runtime.logs import get_logger
from hasten.strategies.compiling import is_settling
from hasten.trust.numbers.numbers import NumbersWatch

log = get_logger(__name__)

P = ParamSpec("P")
R = TypeVar("R")
_WARM_UP: Final = 3
"""Number of plain calls before a capture, in which lazy state is created and libraries choose their kernels."""
_MOST: Final = 4
"""Largest number of stored graphs, one for each set of input shapes."""
_STRANGE: Final = 256
"""Number of distinct inputs after which capturing is given up, because every call differs."""


class CapturedStep(Generic[P, R]):
    """Training step that is called like the function it wraps."""

    def __init__(
        self,
        function: Callable[P, R],
        prepared: PreparedObjects,
        clock: StepClock,
        numbers: NumbersWatch | None,
        refusal: str,
    ) -> None:
        self._function = function
        self._prepared = prepared
        self._clock = clock
        self._numbers = numbers
        self._graphs: dict[object, _Replayed] = {}
        self._seen: dict[object, int] = {}
        self._stream: torch.cuda.Stream | None = None
        self.refusal = ""
        """Reason why the step runs as the plain function; empty while it may be captured."""
        update_wrapper(self, function)
        if refusal:
            self._refuse(refusal)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Run the step and return the function's result with its tensors detached."""
        if self.refusal:
            return _detached(self._function(*args, **kwargs))
        inputs = (args, kwargs)
        key = self._key(inputs)
        known = self._graphs.get(key)
        if known is not None and known.graph.stale:
            del self._graphs[key]
            known = None
        if known is not None:
            return self._replay(known, inputs)
        if any(is_settling(model) for model in self._prepared.models):  # the graph would hold other code
            return self._warm_up(inputs)
        count = self._seen[key] = self._seen.get(key, 0) + 1
        if len(self._seen) > _STRANGE:
            self._refuse(f"its inputs came in {_STRANGE} different shapes or constants")
        if count <= _WARM_UP or len(self._graphs) >= _MOST:
            return self._warm_up(inputs)
        return self._capture(key, inputs)

    def _refuse(self, why: str) -> None:
        self.refusal = why
        log.info("%s runs as it is, not as a CUDA graph: %s", self._name, why)

    @property
    def _name(self) -> str:
        return f"{getattr(self._function, '__name__', 'the step')}()"

    def _key(self, inputs: tuple[Any, Any]) -> object:
        """Return the lookup key of a graph: shapes and dtypes of tensors, all other inputs, and the models' training modes."""
        described = [
            (leaf.shape, leaf.dtype, leaf.device) if isinstance(leaf, Tensor) else leaf for leaf in trees.leaves(inputs)
        ]
        try:
            hash(key := (*described, *(model.training for model in self._prepared.models)))
        except TypeError:
            self._refuse("an argument is neither a tensor nor a constant")
            return None
        return key

    def _warm_up(self, inputs: tuple[Any, Any]) -> R:
        """Run the plain function on the capture stream, and check whether it can be captured."""
        if self.refusal:
            return _detached(self._function(*inputs[0], **inputs[1]))
        stream = self._stream = self._stream or torch.cuda.Stream()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        stream.wait_stream(torch.cuda.current_stream())
        schedules = [getattr(one, "last_epoch", None) for one in self._prepared.schedulers]
        attempts = [one.num_attempts for one in self._prepared.optimizers]
        with torch.cuda.stream(stream):
            result = _detached(self._function(*inputs[0], **inputs[1]))
        torch.cuda.current_stream().wait_stream(stream)
        for tensor in trees.tensors(result):
            tensor.record_stream(torch.cuda.current_stream())
        stepped = [
            one for one, before in zip(self._prepared.optimizers, attempts, strict=True) if one.num_attempts != before
        ]
        if schedules != [getattr(one, "last_epoch", None) for one in self._prepared.schedulers]:
            self._refuse("it calls scheduler.step(), whose numbers a graph would freeze; call it after the step")
        elif why := self._cannot(inputs, stepped):
            self._refuse(why)
        return result

    def _cannot(self, inputs: tuple[Any, Any], stepped: list[PreparedOptimizer]) -> str:
        """Return the reason why the function that has just run cannot be captured; empty if it can."""
        if any(not tensor.is_cuda for tensor in trees.tensors(inputs)):
            return "an input is not on the GPU"
        if not stepped:
            return "it calls no optimizer.step(); a whole step is forward, backward() and step()"
        if self._clock.every != 1 or self._clock.micro:
            return "it is part of an accumulation window; windows are counted on the host"
        if self._clock.pending:
            return "backward(weight=) was used, whose total is agreed on the host"
        if other := next((one for one in stepped if not fused.is_fused(one.optimizer)), None):
            return f"{type(other.optimizer).__name__} is not fused ({fused.refusal(other.optimizer) or 'fused is off'})"
        if any(p.grad is not None for one in stepped for p in one.parameters):
            return "it leaves gradients behind, to which the next step would add; call optimizer.zero_grad() at its end"
        return ""

    def _capture(self, key: object, inputs: tuple[Any, Any]) -> R:
        """Capture the step and replay it once."""
        put_back = self._holding()
        before = [one.num_attempts for one in self._prepared.optimizers]
        clock, passes = self._clock, self._clock.num_passes
        told = clock.before_update, clock.after_update, clock.phases
        clock.before_update = clock.after_update = clock.phases = None
        assert self._stream is not None, "steps were run before"
        numbers = self._numbers
        apart: AbstractContextManager[list[Tensor]] = nullcontext([]) if numbers is None else numbers.apart()
        try:
            with apart as losses:
                graph = StepGraph(
                    lambda args, kwargs: self._function(*args, **kwargs),
                    inputs,
                    self._prepared.models,
                    [one.optimizer for one in self._prepared.optimizers],
                    self._stream,
                )
        except RuntimeError as error:
            first = (str(error).strip().splitlines() or [type(error).__name__])[0]
            self._refuse(f"the capture failed ({first})")
            return self._again(put_back, inputs)
        finally:
            clock.before_update, clock.after_update, clock.phases = told
        after = [one.num_attempts for one in self._prepared.optimizers]
        known = _Replayed(
            graph,
            num_passes=clock.num_passes - passes,
            stepped=[
                one for one, a, b in zip(self._prepared.optimizers, before, after, strict=True) for _ in range(b - a)
            ],
            losses=losses,
        )
        put_back()
        self._graphs[key] = known
        log.info(
            "%s runs as one CUDA graph from now on for these shapes: the host starts it in one call; "
            "performance={'step_graph': False} turns it off",
            self._name,
        )
        return self._replay(known, inputs)

    def _again(self, put_back: Callable[[], None], inputs: tuple[Any, Any]) -> R:
        put_back()
        for one in self._prepared.optimizers:
            one.optimizer.zero_grad()
        return _detached(self._function(*inputs[0], **inputs[1]))

    def _replay(self, known: _Replayed, inputs: tuple[Any, Any]) -> R:
        result: R = known.graph.replay(inputs)
        self._clock.num_passes += known.num_passes
        if self._numbers is not None:
            for loss in known.losses:
                self._numbers.seen(loss.clone(), None)
        for optimizer in known.stepped:
            optimizer.replayed()
        return result

    def _holding(self) -> Callable[[], None]:
        """Return a function that restores all counters of the host to their current values."""
        clock, windows = self._clock, self._clock.holding()
        counted = clock.num_passes, clock.num_updates
        optimizers = [(one, one.counts()) for one in self._prepared.optimizers]

        def put_back() -> None:
            windows()
            clock.num_passes, clock.num_updates = counted
            for one, counts in optimizers:
                one.restore_counts(counts)

        return put_back


class _Replayed:
    """Captured graph with the counter increments of one replay."""

    def __init__(
        self, graph: StepGraph, num_passes: int, stepped: list[PreparedOptimizer], losses: list[Tensor]
    ) -> None:
        self.graph = graph
        self.num_passes = num_passes
        self.stepped = stepped
        self.losses = losses


def _detached(value: R) -> R:
    """Return the value with its tensors detached, so that the caller does not keep the autograd graph alive."""
    result: R = trees.map_tensors(Tensor.detach, value)
    return result
