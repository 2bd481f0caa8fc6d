"""Tracing of a training loop: runs it up to its first batch, then traces one step per variant in forked processes.

The loop is the user's. Its Accelerators have the `ScriptPlanner` as a part of their runs: they are built for the CPU, and `prepare()` makes the
models fake and returns loaders that yield one batch. A fork returns from there into the loop and ends at the first update. The
parent process never gets that far, so that nothing is trained, logged or saved. Patches of torch are in `gpu_rules`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, redirect_stdout
from dataclasses import dataclass, field
from typing import IO, Any, Final

import msgspec
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from hasten.accelerator.components import Components
from hasten.accelerator.facade import Accelerator
from hasten.errors import ConfigError
from hasten.extensions.planning.plan.gpu_rules import use_gpu_rules
from hasten.extensions.planning.plan.traced import (
    SCRIPT_SETTINGS,
    OptimizerFacts,
    PrecisionName,
)
from hasten.extensions.planning.plan.watch import (
    ModuleRoles,
    Saved,
    SavedNotes,
    StepWatch,
    Watched,
    fake_copy,
)
from hasten.extensions.planning.tune.tuning import describe_error
from hasten.modules.meta import init_on_device
from hasten.optim.engine import list_parameters
from hasten.optim.optimizer import PreparedOptimizer
from hasten.optim.run_part import Objects, RunPart, in_every_run
from hasten.optim.window import Holder
from hasten.trees import batch_size, concat, map_tensors, slice_rows

Inspect = Callable[[list[nn.Module]], ModuleRoles]
"""Callback that inspects the models before they are made fake."""


@dataclass(frozen=True, slots=True)
class ScriptRun:
    """Configuration of one forked step."""

    precision: PrecisionName
    recompute: tuple[str, ...]
    samples: int


@dataclass(slots=True)
class TracedStep:
    """Result of one forked step."""

    run: ScriptRun
    watched: Watched = field(default_factory=Watched)
    optimizer: OptimizerFacts | None = None
    saved: Saved | None = None
    error: str = ""


class _EndOfPlanning(BaseException):
    """Raised to leave the user's loop; not an Exception, so that no handler of the loop catches it."""


class ScriptPlanner(RunPart):
    """The planner inside a running script."""

    def __init__(self, precisions: Sequence[PrecisionName], inspect: Inspect) -> None:
        self._precisions = precisions
        self._inspect = inspect
        self.steps: list[TracedStep] = []
        self.own: dict[str, str | int] = {}
        """Settings of `OWN` that the script passes to its Accelerator."""
        self._run: ScriptRun | None = None
        self._to_parent: IO[bytes] | None = None
        self._accelerators: list[Accelerator] = []
        self._anatomy = ModuleRoles()
        self._swapped: dict[int, nn.Parameter] = {}
        self._mode: Any = None  # Any: torch leaves FakeTensorMode untyped
        self._models: list[nn.Module] = []
        self._watch: StepWatch | None = None
        self._notes: SavedNotes | None = None
        self._inside = ExitStack()
        self._preparing = ExitStack()
        self._loaders: dict[int, DataLoader[Any]] = {}
        """Loaders of the `prepare()` that runs, by position."""
        self._building = ExitStack()
        """While open, models are built without memory."""

    def run(self, training_loop: Callable[[], object]) -> list[TracedStep]:
        """Run `loop` until its first `prepare()` with a model, and trace its step there.

        Raises: ConfigError when the loop ends or fails before, or when the step cannot be traced.
        """
        try:
            with in_every_run(self), redirect_stdout(sys.stderr), self._building:
                self._building.enter_context(init_on_device("meta"))
                training_loop()
        except _EndOfPlanning:
            return self.steps
        except SystemExit as error:
            if isinstance(error.code, str):
                exit_words = f", saying {error.code!r}"
            else:
                exit_words = f" with exit code {error.code or 0}"
            self._end_with_error(f"it ended{exit_words}")
        # any kind: the loop is the user's, and the message includes the error
        except Exception as error:
            # already has a full message
            if self._run is None and isinstance(error, ConfigError):
                raise
            self._end_with_error(describe_error(error).rstrip("."))
        if self._run is not None:
            self._end_with_error("it ended before its first update")
        raise ConfigError(
            "the script never called Accelerator.prepare() with a model, so there is no training step to plan; give a script "
            "that trains with hasten, or module:function."
        )

    def _end_with_error(self, cause: str) -> None:
        """End a forked step, or the planning, with an error message."""
        if self._run is not None:
            self._send_step(TracedStep(self._run, error=cause))
        raise ConfigError(
            f"the script stopped before its first batch, so there is no step to plan: {cause}. Run it directly to see the cause, or give "
            "module:function, which needs no data."
        )

    # -- in the parent process --------------------------------------------------------------------------------------
    def preparing(self, objects: Objects) -> Objects:
        """Fork once per variant where the first model is prepared, and continue only in the forks, with fake tensors."""
        models = []
        for prepared_object in objects:
            if isinstance(prepared_object, nn.Module):
                models.append(prepared_object)
        # the Accelerator is rebuilt for the variant, and continues
        if self._run is None and models:
            self._anatomy = self._inspect(models)
            block_classes = self._anatomy.block_classes
            step_variants: list[tuple[PrecisionName, tuple[str, ...]]] = []
            for precision in self._precisions:
                step_variants.append((precision, ()))
                if block_classes:
                    step_variants.append((precision, block_classes))
            self._fork_all(step_variants)
        if self._run is not None:
            self._make_fake(objects)
            self._preparing.enter_context(self._mode)
        loaders = {}
        for index, prepared_object in enumerate(objects):
            if isinstance(prepared_object, DataLoader):
                loaders[index] = prepared_object
        self._loaders = loaders
        other_objects = list(objects)
        for index in self._loaders:
            other_objects[index] = None
        return tuple(other_objects)

    def prepared(self, objects: Objects) -> Objects:
        """Return the prepared objects, and loaders that yield one batch."""
        self._preparing.close()
        script_loaders = self._loaders
        self._loaders = {}
        prepared_objects = list(objects)
        for index, script_loader in script_loaders.items():
            prepared_objects[index] = OneBatch(script_loader, self)
        return tuple(prepared_objects)

    def _fork_all(
        self, variants: Sequence[tuple[PrecisionName, tuple[str, ...]]]
    ) -> None:
        forks: list[tuple[ScriptRun, int, IO[bytes]]] = []
        for precision, recompute_classes in variants:
            for num_samples in (2, 1):
                script_run = ScriptRun(precision, recompute_classes, num_samples)
                read_fd, write_fd = os.pipe()
                pid = os.fork()
                if pid == 0:
                    os.close(read_fd)
                    self._become_step(script_run, write_fd)
                    return
                os.close(write_fd)
                forks.append((script_run, pid, os.fdopen(read_fd, "rb")))
        for script_run, pid, pipe in forks:
            with pipe:
                encoded_step = pipe.read()
            os.waitpid(pid, 0)
            self.steps.append(_decode_step(encoded_step, script_run))
        raise _EndOfPlanning

    # -- in a fork --------------------------------------------------------------------------------------------------
    def _become_step(self, script_run: ScriptRun, write_fd: int) -> None:
        self._run = script_run
        self._to_parent = os.fdopen(write_fd, "wb")
        null_fd = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null_fd, 1)
        os.dup2(null_fd, 2)
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)
        self._building.close()
        for accelerator in self._accelerators:
            # the script already holds a reference, so it is rebuilt in place
            Accelerator.__init__(accelerator)

    def built(self, run: Components) -> None:
        """Register an Accelerator of the script."""
        accelerator = run.accelerator
        if not any(
            accelerator is known_accelerator for known_accelerator in self._accelerators
        ):
            self._accelerators.append(accelerator)

    # Any: arguments of an Accelerator
    def settings(self, given: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the arguments of an Accelerator in place of the script's."""
        if self._run is None:
            script_settings = {}
            for name in SCRIPT_SETTINGS:
                if given.get(name) is not None:
                    script_settings[name] = given[name]
            self.own |= script_settings
        planned_arguments: dict[str, Any] = {
            "cpu": True,
            "trust": "off",
            "strategy": "none",
        }
        # everything is on the CPU, and torch cannot move fake tensors
        planned_arguments["device_placement"] = False
        precision = "no" if self._run is None else self._run.precision
        planned_arguments["mixed_precision"] = precision
        if self._run is not None and self._run.recompute:
            planned_arguments["recompute"] = self._run.recompute
        return planned_arguments

    def _make_fake(self, objects: Objects) -> None:
        for model in (
            prepared_object
            for prepared_object in objects
            if isinstance(prepared_object, nn.Module)
        ):
            with self._mode:
                self._swapped |= fake_copy(model)
            self._models.append(model)
        for optimizer in (
            prepared_object
            for prepared_object in objects
            if isinstance(prepared_object, Optimizer)
        ):
            for group in optimizer.param_groups:
                swapped_parameters = []
                for parameter in group["params"]:
                    swapped_parameters.append(
                        self._swapped.get(id(parameter), parameter)
                    )
                group["params"] = swapped_parameters
                if (
                    "foreach" in group
                    and group["foreach"] is None
                    and not group.get("fused")
                ):
                    group["foreach"] = True  # torch's default on a GPU

    def backward_done(self) -> None:
        """Let the optimizer step after the first backward pass, even inside an accumulation window."""
        for accelerator in self._accelerators:
            accelerator.sync_gradients = True

    def before_update(self, optimizer: Holder) -> bool:
        """End the traced step."""
        assert isinstance(optimizer, PreparedOptimizer), "of an Accelerator"
        self._end_step(optimizer.optimizer)
        return False

    def first_batch(self, loader: DataLoader[Any]) -> Any:  # Any: the loader's batches
        """Return the first batch of a loader as fake tensors, with the number of samples of this run."""
        assert self._run is not None, (
            "loaders of the process that forks are not replaced"
        )
        first_batch = next(iter(loader))
        num_rows = batch_size(first_batch) or 1
        num_samples = self._run.samples
        if num_rows > 1:
            small_batch = slice_rows(
                first_batch, slice(0, min(num_rows, num_samples)), num_rows
            )
        else:
            small_batch = first_batch
        if num_rows < num_samples:
            small_batch = concat([small_batch] * num_samples)
        self._begin_trace()
        return map_tensors(self._to_fake, small_batch)

    def _to_fake(self, tensor: Tensor) -> Tensor:
        return torch.empty(tensor.shape, dtype=tensor.dtype)

    def _begin_trace(self) -> None:
        if self._watch is not None:
            return
        self._watch = step_watch = StepWatch(self._models)
        self._notes = saved_notes = SavedNotes(step_watch, self._anatomy)
        self._inside.enter_context(self._mode)
        self._inside.enter_context(step_watch.track_modules())
        handle = register_module_forward_pre_hook(saved_notes.record_input)
        self._inside.callback(handle.remove)
        self._inside.enter_context(use_gpu_rules(saved_notes.record_attention))
        if self._run is not None and not self._run.recompute:
            self._inside.enter_context(
                saved_tensors_hooks(saved_notes.record_saved, lambda tensor: tensor)
            )
        self._inside.enter_context(step_watch)

    def _end_step(self, optimizer: Optimizer) -> None:
        """Measure the update in place of performing it, and end the traced step."""
        if self._run is None or self._watch is None or self._notes is None:
            return
        traced_step = TracedStep(self._run)
        step_watch = self._watch
        traced_step.watched = Watched(
            step_watch.measured.alive[:],
            dict(step_watch.measured.flops),
            step_watch.measured.moved,
            step_watch.measured.operations,
        )
        traced_step.saved = self._notes.saved
        num_moments = len(step_watch.measured.alive)
        optimizer.step()
        traced_step.optimizer = _measure_optimizer(
            optimizer,
            step_watch.measured.alive[num_moments:],
            step_watch.measured.alive[num_moments - 1] if num_moments else (0, 0, 0),
        )
        traced_step.watched.alive = _thin_moments(traced_step.watched.alive)
        self._send_step(traced_step)

    def _send_step(self, traced_step: TracedStep) -> None:
        assert self._to_parent is not None, "only forks answer"
        # closing it would run the user's exit handlers; the process ends anyway
        self._inside.pop_all()
        self._to_parent.write(msgspec.json.encode(traced_step))
        self._to_parent.close()
        os._exit(0)


_NUM_MOMENTS: Final = 256


class OneBatch:
    """A loader that yields one batch; all other attributes are those of the original loader."""

    def __init__(self, loader: DataLoader[Any], planner: ScriptPlanner) -> None:
        self._loader = loader
        self._takeover = planner

    def __iter__(self) -> Iterator[Any]:
        yield self._takeover.first_batch(self._loader)

    def __len__(self) -> int:
        return len(self._loader)

    def __getattr__(self, name: str) -> Any:  # Any: attributes of the user's loader
        return getattr(self._loader, name)


def _decode_step(encoded_step: bytes, script_run: ScriptRun) -> TracedStep:
    try:
        return msgspec.json.decode(encoded_step, type=TracedStep)
    except msgspec.DecodeError:
        return TracedStep(script_run, error="the process that traced it died")


def _thin_moments(live_bytes: list[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    """Return the highest moment of each of a few hundred equal intervals."""
    interval_length = max(1, -(-len(live_bytes) // _NUM_MOMENTS))
    intervals = []
    for start in range(0, len(live_bytes), interval_length):
        intervals.append(max(live_bytes[start : start + interval_length], key=sum))
    return intervals


def _measure_optimizer(
    optimizer: Optimizer,
    live_bytes: list[tuple[int, int, int]],
    bytes_before: tuple[int, int, int],
) -> OptimizerFacts:
    """Return an optimizer's memory: its state after the first update, and temporary allocations during the update."""
    trained_parameters = []
    for parameter in list_parameters(optimizer.param_groups):
        if parameter.requires_grad:
            trained_parameters.append(parameter)
    state_item_sizes: tuple[int, ...] = ()
    counter_bytes = 0
    for parameter in trained_parameters[:1]:
        item_sizes = []
        counter_bytes = 0
        for state_tensor in optimizer.state.get(parameter, {}).values():
            if isinstance(state_tensor, Tensor):
                if state_tensor.shape == parameter.shape:
                    item_sizes.append(state_tensor.element_size())
                else:
                    counter_bytes += state_tensor.numel() * state_tensor.element_size()
        state_item_sizes = tuple(item_sizes)
    parameter_bytes = sum(p.numel() * p.element_size() for p in trained_parameters) or 1
    state_bytes = sum(p.numel() for p in trained_parameters) * sum(state_item_sizes)
    peak_bytes = (
        max((activations for activations, _, _ in live_bytes), default=0)
        - bytes_before[0]
    )
    return OptimizerFacts(
        name=type(optimizer).__name__,
        states=state_item_sizes,
        counter_bytes=counter_bytes,
        passing=max(0.0, (peak_bytes - state_bytes) / parameter_bytes),
    )
