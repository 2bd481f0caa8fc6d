"""capture_step(): a training step that runs as one CUDA graph where possible, and as the plain function elsewhere.

`StepGraph` is one captured graph for inputs of one shape; it depends only on torch. Each replay makes the same calls on the device, but the
step's Python code does not run again. `CapturedStep` therefore updates the Accelerator's counters on the host (updates, losses to check,
passes of a step) after each replay.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import update_wrapper
from typing import Any, Final, Generic, ParamSpec, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hasten import trees
from hasten.accelerator.components import Components
from hasten.accelerator.preparing import fused_refusal, is_fused
from hasten.optim.clock import StepClock
from hasten.optim.optimizer import PreparedOptimizer
from hasten.optim.run_part import RunPart, RunParts
from hasten.prepare_args import PreparedObjects
from hasten.runtime.logs import get_logger
from hasten.strategies.choose import chooses_speed
from hasten.trees import Tree


class StepGraph:
    """Captured work of `function(*inputs)`: forward, backward and updates of `optimizers`, which must be fused.

    A graph holds addresses and constants. Learning rates are read anew at every replay; any other change of the
    optimizers' options, or tensors at other addresses, make it stale.
    """

    def __init__(
        self,
        function: Callable[..., Any],  # Any: the result of the user's step
        inputs: Tree,
        models: Sequence[nn.Module],
        optimizers: Sequence[Optimizer],
        stream: torch.cuda.Stream,
    ) -> None:
        self._models = models
        self._optimizers = optimizers
        self._inputs = [tensor.clone() for tensor in trees.tensors(inputs)]
        self._rates = list(map(_LearningRate, self._param_groups()))
        self._graph = torch.cuda.CUDAGraph()
        static_inputs = trees.replace_tensors(inputs, self._inputs)
        with (
            _capturable_optimizers(self._rates),
            # thread_local: a loader's threads may call CUDA meanwhile
            torch.cuda.graph(
                self._graph, stream=stream, capture_error_mode="thread_local"
            ),
        ):
            step_result = function(*static_inputs)
        self._returned = trees.map_tensors(Tensor.detach, step_result)
        self._outputs = trees.tensors(self._returned)
        self._captured_addresses = self._tensor_addresses()
        self._options = [group_rate.read_options() for group_rate in self._rates]

    @property
    def stale(self) -> bool:
        """True if options or addresses have changed since the capture."""
        captured_groups = [group_rate.group for group_rate in self._rates]
        return (
            list(map(id, captured_groups)) != list(map(id, self._param_groups()))
            or self._options
            != [group_rate.read_options() for group_rate in self._rates]
            or self._captured_addresses != self._tensor_addresses()
        )

    def _param_groups(self) -> list[dict[str, Any]]:
        param_groups: list[dict[str, Any]] = []
        for optimizer in self._optimizers:
            param_groups += optimizer.param_groups
        return param_groups

    def replay_step(self, inputs: Tree) -> Tree:
        """Run the step on other inputs of the same shapes; return its result in new tensors."""
        for static_input, input_tensor in zip(
            self._inputs, trees.tensors(inputs), strict=True
        ):
            static_input.copy_(input_tensor, non_blocking=True)
        for group_rate in self._rates:
            group_rate.copy_rate()
        self._graph.replay()
        outputs = [tensor.clone() for tensor in self._outputs]
        if outputs:
            return trees.replace_tensors(self._returned, outputs)
        return self._returned

    def _tensor_addresses(self) -> list[int]:
        """Return the addresses of all tensors that a step reads and writes besides its inputs."""
        addresses = []
        for model in self._models:
            for tensor in (*model.parameters(), *model.buffers()):
                addresses.append(tensor.data_ptr())
        for optimizer in self._optimizers:
            for state in optimizer.state.values():
                for state_value in state.values():
                    if isinstance(state_value, Tensor):
                        addresses.append(state_value.data_ptr())
        return addresses


class _LearningRate:
    """Learning rate of a group: a number for the user and schedulers, a tensor on the device for the graph."""

    def __init__(self, param_group: dict[str, Any]) -> None:
        self.group = param_group
        device = param_group["params"][0].device
        self._last = float(param_group["lr"])
        self.tensor = torch.full((), self._last, dtype=torch.float32, device=device)

    def read_options(self) -> dict[str, Any]:  # Any: torch's options of an optimizer
        """Return the options that are constants in a graph, and the number of parameters."""
        constant_options = {}
        for name, state_value in self.group.items():
            if name not in ("lr", "params", "initial_lr"):
                constant_options[name] = state_value
        return {**constant_options, "params": len(self.group["params"])}

    def copy_rate(self) -> None:
        """Copy the group's current learning rate to the tensor."""
        current_rate = float(self.group["lr"])
        if current_rate != self._last:
            self._last = current_rate
            self.tensor.fill_(current_rate)


@contextmanager
def _capturable_optimizers(rates: Sequence[_LearningRate]) -> Iterator[None]:
    """Context manager in which optimizers can be captured: they read learning rates from the device."""
    group_options = []
    for group_rate in rates:
        group_options.append(
            (group_rate.group["lr"], group_rate.group.get("capturable"))
        )
    for group_rate in rates:
        group_rate.group["lr"] = group_rate.tensor
        if "capturable" in group_rate.group:
            group_rate.group["capturable"] = True
    try:
        yield
    finally:
        for group_rate, (lr, capturable) in zip(rates, group_options, strict=True):
            group_rate.group["lr"] = lr
            if "capturable" in group_rate.group:
                group_rate.group["capturable"] = capturable


log = get_logger(__name__)

P = ParamSpec("P")
R = TypeVar("R")
_NUM_WARM_UP_CALLS: Final = 3
"""Number of plain calls before a capture, in which lazy state is created and libraries choose their kernels."""
_MOST_GRAPHS: Final = 4
"""Largest number of stored graphs, one for each set of input shapes."""
_MOST_DISTINCT_INPUTS: Final = 256
"""Number of distinct inputs after which capturing is given up, because every call differs."""


class CapturedStep(Generic[P, R]):
    """Training step that is called like the function it wraps."""

    def __init__(
        self,
        function: Callable[P, R],
        prepared_object: PreparedObjects,
        clock: StepClock,
        refusal: str,
    ) -> None:
        self._function = function
        self._prepared = prepared_object
        self._clock = clock
        self._graphs: dict[object, _ReplayedStep] = {}
        self._seen: dict[object, int] = {}
        self._stream: torch.cuda.Stream | None = None
        self.refusal = ""
        """Reason why the step runs as the plain function; empty while it may be captured."""
        update_wrapper(self, function)
        if refusal:
            self._refuse_capture(refusal)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Run the step and return the function's result with its tensors detached."""
        if self.refusal:
            return _detach_tensors(self._function(*args, **kwargs))
        inputs = (args, kwargs)
        graph_key = self._make_key(inputs)
        replayed_step = self._graphs.get(graph_key)
        if replayed_step is not None and replayed_step.graph.stale:
            del self._graphs[graph_key]
            replayed_step = None
        if replayed_step is not None:
            return self._replay_step(replayed_step, inputs)
        num_calls = self._seen[graph_key] = self._seen.get(graph_key, 0) + 1
        if len(self._seen) > _MOST_DISTINCT_INPUTS:
            self._refuse_capture(
                f"its inputs came in {_MOST_DISTINCT_INPUTS} different shapes or constants"
            )
        if num_calls <= _NUM_WARM_UP_CALLS or len(self._graphs) >= _MOST_GRAPHS:
            return self._warm_up(inputs)
        return self._capture_graph(graph_key, inputs)

    def _refuse_capture(self, reason: str) -> None:
        self.refusal = reason
        log.info("%s runs as it is, not as a CUDA graph: %s", self._name, reason)

    @property
    def _name(self) -> str:
        return f"{getattr(self._function, '__name__', 'the step')}()"

    def _make_key(self, inputs: tuple[Any, Any]) -> object:
        """Return the lookup key of a graph: shapes and dtypes of tensors, all other inputs, and the models' training modes."""
        descriptions = []
        for leaf in trees.leaves(inputs):
            if isinstance(leaf, Tensor):
                leaf = (leaf.shape, leaf.dtype, leaf.device)
            descriptions.append(leaf)
        try:
            hash(
                graph_key := (
                    *descriptions,
                    *(model.training for model in self._prepared.models),
                )
            )
        except TypeError:
            self._refuse_capture("an argument is neither a tensor nor a constant")
            return None
        return graph_key

    def _warm_up(self, inputs: tuple[Any, Any]) -> R:
        """Run the plain function on the capture stream, and check whether it can be captured."""
        if self.refusal:
            return _detach_tensors(self._function(*inputs[0], **inputs[1]))
        stream = self._stream = self._stream or torch.cuda.Stream()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        stream.wait_stream(torch.cuda.current_stream())
        epochs_before = [
            getattr(prepared_object, "last_epoch", None)
            for prepared_object in self._prepared.schedulers
        ]
        attempts_before = []
        for prepared_object in self._prepared.optimizers:
            attempts_before.append(prepared_object.num_attempts)
        with torch.cuda.stream(stream):
            detached_result = _detach_tensors(self._function(*inputs[0], **inputs[1]))
        torch.cuda.current_stream().wait_stream(stream)
        for tensor in trees.tensors(detached_result):
            tensor.record_stream(torch.cuda.current_stream())
        stepped_optimizers = []
        for prepared_object, num_before in zip(
            self._prepared.optimizers, attempts_before, strict=True
        ):
            if prepared_object.num_attempts != num_before:
                stepped_optimizers.append(prepared_object)
        if epochs_before != [
            getattr(prepared_object, "last_epoch", None)
            for prepared_object in self._prepared.schedulers
        ]:
            self._refuse_capture(
                "it calls scheduler.step(), whose numbers a graph would freeze; call it after the step"
            )
        elif obstacle := self._capture_obstacle(inputs, stepped_optimizers):
            self._refuse_capture(obstacle)
        return detached_result

    def _capture_obstacle(
        self, inputs: tuple[Any, Any], stepped_optimizers: list[PreparedOptimizer]
    ) -> str:
        """Return the reason why the function that has just run cannot be captured; empty if it can."""
        if any(not tensor.is_cuda for tensor in trees.tensors(inputs)):
            return "an input is not on the GPU"
        if not stepped_optimizers:
            return "it calls no optimizer.step(); a whole step is forward, backward() and step()"
        if self._clock.every != 1 or self._clock.micro:
            return (
                "it is part of an accumulation window; windows are counted on the host"
            )
        if self._clock.needs_correction:
            return "backward(weight=) was used, whose total is agreed on the host"
        for plain_optimizer in stepped_optimizers:
            if is_fused(plain_optimizer.optimizer):
                continue
            return f"{type(plain_optimizer.optimizer).__name__} is not fused ({fused_refusal(plain_optimizer.optimizer) or 'fused is off'})"
        if any(
            parameter.grad is not None
            for optimizer in stepped_optimizers
            for parameter in optimizer.parameters
        ):
            return "it leaves gradients behind, to which the next step would add; call optimizer.zero_grad() at its end"
        return ""

    def _capture_graph(self, graph_key: object, inputs: tuple[Any, Any]) -> R:
        """Capture the step and replay it once."""
        restore_counters = self._counter_restorer()
        attempts_before = [
            optimizer.num_attempts for optimizer in self._prepared.optimizers
        ]
        clock = self._clock
        passes_before = self._clock.num_passes
        assert self._stream is not None, "steps were run before"
        captured = _CapturedScalars()
        run_parts = clock.parts
        clock.parts = RunParts(captured)
        try:
            graph = StepGraph(
                lambda args, kwargs: self._function(*args, **kwargs),
                inputs,
                self._prepared.models,
                [optimizer.optimizer for optimizer in self._prepared.optimizers],
                self._stream,
            )
        except RuntimeError as error:
            first_line = (str(error).strip().splitlines() or [type(error).__name__])[0]
            self._refuse_capture(f"the capture failed ({first_line})")
            return self._run_plainly(restore_counters, inputs)
        finally:
            clock.parts = run_parts
        attempts_after = [
            optimizer.num_attempts for optimizer in self._prepared.optimizers
        ]
        stepped_optimizers = []
        for optimizer, num_before, num_after in zip(
            self._prepared.optimizers, attempts_before, attempts_after, strict=True
        ):
            stepped_optimizers += [optimizer] * (num_after - num_before)
        replayed_step = _ReplayedStep(
            graph,
            num_passes=clock.num_passes - passes_before,
            stepped=stepped_optimizers,
            scalars=captured,
        )
        restore_counters()
        self._graphs[graph_key] = replayed_step
        log.info(
            "%s runs as one CUDA graph from now on for these shapes: the host starts it in one call; "
            "performance={'step_graph': False} turns it off",
            self._name,
        )
        return self._replay_step(replayed_step, inputs)

    def _run_plainly(
        self, restore_counters: Callable[[], None], inputs: tuple[Any, Any]
    ) -> R:
        restore_counters()
        for optimizer in self._prepared.optimizers:
            optimizer.optimizer.zero_grad()
        return _detach_tensors(self._function(*inputs[0], **inputs[1]))

    def _replay_step(self, replayed_step: _ReplayedStep, inputs: tuple[Any, Any]) -> R:
        detached_result: R = replayed_step.graph.replay_step(inputs)
        self._clock.num_passes += replayed_step.num_passes
        run_parts = self._clock.parts
        for watch_loss in run_parts.loss:
            for loss in replayed_step.scalars.losses:
                watch_loss(loss.clone(), None)
        for watch_norm in run_parts.clipped:
            for norm in replayed_step.scalars.norms:
                watch_norm(norm.clone())
        for optimizer in replayed_step.stepped:
            optimizer.record_replay()
        return detached_result

    def _counter_restorer(self) -> Callable[[], None]:
        """Return a function that restores all counters of the host to their current values."""
        clock = self._clock
        clock_counts = clock.num_passes, clock.num_updates
        optimizer_counts = []
        for optimizer in self._prepared.optimizers:
            optimizer_counts.append((optimizer, optimizer.update_counts()))

        def restore_counters() -> None:
            clock.start_new_window()
            clock.num_passes, clock.num_updates = clock_counts
            for optimizer, counts in optimizer_counts:
                optimizer.restore_counts(counts)

        return restore_counters


class _CapturedScalars(RunPart):
    """Losses and gradient norms of a captured step, which each replay overwrites."""

    def __init__(self) -> None:
        self.losses: list[Tensor] = []
        self.norms: list[Tensor] = []

    def loss(self, loss: Tensor, weight: float | Tensor | None) -> None:
        self.losses.append(loss.detach())

    def clipped(self, norm: Tensor) -> None:
        self.norms.append(norm.detach())


@dataclass(frozen=True, slots=True)
class _ReplayedStep:
    """Captured graph with the counter increments of one replay."""

    graph: StepGraph
    num_passes: int
    stepped: list[PreparedOptimizer]
    scalars: _CapturedScalars


def _detach_tensors(state_value: R) -> R:
    """Return the value with its tensors detached, so that the caller does not keep the autograd graph alive."""
    detached_result: R = trees.map_tensors(Tensor.detach, state_value)
    return detached_result


def capture_step(function: Callable[P, R], run: Components) -> CapturedStep[P, R]:
    """Return the training step of a run as one CUDA graph where possible; elsewhere the reason is logged."""
    return CapturedStep(function, run.prepared, run.clock, _run_refusal(run))


def _run_refusal(run: Components) -> str:
    """Return the reason why steps are not captured in this run; empty if they may be captured."""
    config = run.accelerator.config
    ctx = run.accelerator.ctx
    run_parts = run.clock.parts
    if not chooses_speed(config.performance):
        return "performance is off; Accelerator(performance='auto') captures it"
    if not config.performance.step_graph:
        return "performance.step_graph is off"
    if ctx.device.type != "cuda":
        return (
            f"CUDA graphs need a CUDA device, this process trains on {ctx.device.type}"
        )
    if ctx.world.size > 1:
        return f"{ctx.world.size} processes exchange gradients inside the step; only one process is captured"
    if run.precision.scaler is not None:
        return "mixed_precision='fp16' decides on the host whether an update is applied; 'bf16' can be captured"
    if config.trust.numbers not in ("off", "report"):
        return f"trust.numbers={config.trust.numbers} looks at gradients on the host before each update"
    if config.offload is not None:
        return f"offload={config.offload!r} copies training state between updates, in an order that the host decides"
    if run_parts.gradients:
        return f"{run_parts.names('gradients')} uses gradients on the host before each update"
    if config.gradient_accumulation.num_steps > 1:
        return "gradients are accumulated over micro-steps, which the host counts"
    if config.dynamo.makes_cuda_graphs:
        return f"dynamo backend {config.dynamo.backend!r} in mode {config.dynamo.mode!r} makes CUDA graphs itself"
    return ""
