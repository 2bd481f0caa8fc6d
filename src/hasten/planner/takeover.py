"""Runs a training loop up to its first batch, then traces one step of it per variant, each in a forked process.

The loop is the user's own. While it runs, an Accelerator is built for the CPU, and `prepare()` takes over: it makes the models
fake, and hands out loaders that give one batch. A fork returns from there into the loop and ends at the first update. The
process that forked never comes that far, so that nothing is trained, logged or saved. Patches of hasten are in this
file, those of torch in `gpu_rules`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, redirect_stdout
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

from hasten.accelerator import facade
from hasten.accelerator.preparing import Preparer
from hasten.bigmodel.meta import init_on_device
from hasten.errors import ConfigError
from hasten.optim.optimizer import PreparedOptimizer
from hasten.planner.gpu_rules import gpu_rules
from hasten.planner.saved import Anatomy, Saved, SavedNotes
from hasten.planner.traced import OptimizerFacts, PrecisionName
from hasten.planner.watch import StepWatch, Watched, fake_copy
from hasten.trees import batch_size, concat, map_tensors, slice_rows

Inspect = Callable[[list[nn.Module]], Anatomy]
"""Looks at the models before they are made fake."""


@dataclass(frozen=True, slots=True)
class Run:
    """One forked step: what to trace."""

    precision: PrecisionName
    recompute: tuple[str, ...]
    samples: int


@dataclass(slots=True)
class Step:
    """What one forked step found."""

    run: Run
    watched: Watched = field(default_factory=Watched)
    optimizer: OptimizerFacts | None = None
    saved: Saved | None = None
    batch_size: int = 0
    error: str = ""


class _EndOfPlanning(BaseException):
    """Leaves the user's loop: not an Exception, so that no handler of theirs keeps it."""


class Takeover:
    """The planner inside a running script."""

    def __init__(self, precisions: Sequence[PrecisionName], inspect: Inspect, workers: int) -> None:
        self._precisions = precisions
        self._inspect = inspect
        self._workers = max(1, workers)
        self.steps: list[Step] = []
        self._run: Run | None = None
        self._to_parent: IO[bytes] | None = None
        self._accelerators: list[facade.Accelerator] = []
        self._anatomy = Anatomy()
        self._swapped: dict[int, nn.Parameter] = {}
        self._mode: Any = None  # Any: torch leaves FakeTensorMode untyped
        self._models: list[nn.Module] = []
        self._watch: StepWatch | None = None
        self._notes: SavedNotes | None = None
        self._inside = ExitStack()
        self._building = ExitStack()
        """While open, models are built without memory."""
        self._rows = 0

    def run(self, loop: Callable[[], object]) -> list[Step]:
        """Run `loop` until its first `prepare()` with a model, and trace its step there.

        Raises: ConfigError when it ends or fails before, or when the step cannot be traced.
        """
        try:
            with _patched(self), redirect_stdout(sys.stderr), self._building:
                self._building.enter_context(init_on_device("meta"))
                loop()
        except _EndOfPlanning:
            return self.steps
        except SystemExit as error:
            self._fail(f"it ended with exit code {error.code} before its first batch")
        except Exception as error:  # of any kind: the loop is the user's own, and the sentence says what it raised
            self._fail(f"{type(error).__name__}: {_first_line(error)}")
        if self._run is not None:
            self._fail("it ended before its first update")
        raise ConfigError(
            "the script never called Accelerator.prepare() with a model, so there is no training step to plan; give a script "
            "that trains with hasten, or module:function."
        )

    def _fail(self, what: str) -> None:
        """End a forked step, or the planning, with a sentence."""
        if self._run is not None:
            self._answer(Step(self._run, error=what))
        raise ConfigError(
            f"the script stopped before its first batch, so there is no step to plan: {what}. Run it alone to see where, or "
            "give module:function, which needs no data."
        )

    # -- in the process that forks ----------------------------------------------------------------------------------
    def prepare(self, preparer: Preparer, objects: tuple[Any, ...]) -> tuple[Any, ...]:  # Any: the user's objects
        """Stand in for `Preparer.prepare`: fork once for each variant, and go on in the fork alone."""
        models = [value for value in objects if isinstance(value, nn.Module)]
        if self._run is None and models:
            self._anatomy = self._inspect(models)
            blocks = self._anatomy.block_classes
            owner = next(index for index, one in enumerate(self._accelerators) if one._preparer is preparer)
            self._fork_all([(p, names) for p in self._precisions for names in ((), blocks)[: 1 + bool(blocks)]])
            preparer = self._accelerators[owner]._preparer  # built again, for this variant
        return self._prepare_fake(preparer, objects)

    def _fork_all(self, variants: Sequence[tuple[PrecisionName, tuple[str, ...]]]) -> None:
        waiting = [Run(precision, names, samples) for precision, names in variants for samples in (2, 1)]
        running: list[tuple[Run, int, IO[bytes]]] = []
        while waiting or running:
            while waiting and len(running) < self._workers:
                run = waiting.pop(0)
                source, target = os.pipe()
                pid = os.fork()
                if pid == 0:
                    os.close(source)
                    self._become(run, target)
                    return
                os.close(target)
                running.append((run, pid, os.fdopen(source, "rb")))
            run, pid, pipe = running.pop(0)
            with pipe:
                content = pipe.read()
            os.waitpid(pid, 0)
            self.steps.append(_decode(content, run))
        raise _EndOfPlanning

    # -- in a fork --------------------------------------------------------------------------------------------------
    def _become(self, run: Run, target: int) -> None:
        self._run = run
        self._to_parent = os.fdopen(target, "wb")
        silent = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silent, 1)
        os.dup2(silent, 2)
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)
        self._building.close()
        for accelerator in self._accelerators:
            _INIT(accelerator)

    def built(self, accelerator: facade.Accelerator) -> None:
        """Remember an Accelerator of the script."""
        self._accelerators.append(accelerator)

    def settings(self) -> dict[str, Any]:  # Any: arguments of an Accelerator
        """What an Accelerator is built with instead of what the script gave."""
        own: dict[str, Any] = {"cpu": True, "numbers": "off", "stall": "off", "divergence": "off", "strategy": "none"}
        own["device_placement"] = False  # everything is on the CPU, and torch cannot move what is fake
        own["mixed_precision"] = "no" if self._run is None else self._run.precision
        if self._run is not None and self._run.recompute:
            own["recompute"] = self._run.recompute
        return own

    def _prepare_fake(self, preparer: Preparer, objects: tuple[Any, ...]) -> tuple[Any, ...]:
        if self._run is None:  # a loader or optimizer before the first model
            return objects
        for model in (value for value in objects if isinstance(value, nn.Module)):
            with self._mode:
                self._swapped |= fake_copy(model)
            self._models.append(model)
        for optimizer in (value for value in objects if isinstance(value, Optimizer)):
            for group in optimizer.param_groups:
                group["params"] = [self._swapped.get(id(parameter), parameter) for parameter in group["params"]]
                if "foreach" in group and group["foreach"] is None and not group.get("fused"):
                    group["foreach"] = True  # as torch decides on a GPU
        loaders = {index: value for index, value in enumerate(objects) if isinstance(value, DataLoader)}
        rest = tuple(value for index, value in enumerate(objects) if index not in loaders)
        with self._mode:
            prepared = list(_PREPARE(preparer, rest)) if rest else []
        for index in sorted(loaders):
            prepared.insert(index, OneBatch(loaders[index], self))
        return tuple(prepared)

    def batch(self, loader: DataLoader[Any]) -> Any:  # Any: the loader's own batches
        """The first batch of a loader, with as many samples as this run asks for, as fake tensors."""
        assert self._run is not None, "loaders of the process that forks are not replaced"
        first = next(iter(loader))
        rows = batch_size(first) or 1
        self._rows = self._rows or rows
        wanted = self._run.samples
        few = slice_rows(first, slice(0, min(rows, wanted)), rows) if rows > 1 else first
        if rows < wanted:
            few = concat([few] * wanted)
        self._begin()
        return map_tensors(self._fake, few)

    def _fake(self, tensor: Tensor) -> Tensor:
        return torch.empty(tensor.shape, dtype=tensor.dtype)

    def _begin(self) -> None:
        if self._watch is not None:
            return
        self._watch = watch = StepWatch(self._models)
        self._notes = notes = SavedNotes(watch, self._anatomy)
        self._inside.enter_context(self._mode)
        self._inside.enter_context(watch.hooks())
        handle = register_module_forward_pre_hook(notes.entered)
        self._inside.callback(handle.remove)
        self._inside.enter_context(gpu_rules(notes.attention))
        if self._run is not None and not self._run.recompute:
            self._inside.enter_context(saved_tensors_hooks(notes.save, lambda tensor: tensor))
        self._inside.enter_context(watch)

    def step(self, optimizer: PreparedOptimizer) -> None:
        """Stand in for the update: the traced step ends here."""
        if self._run is None or self._watch is None or self._notes is None:
            return
        step = Step(self._run, batch_size=self._rows)
        watch = self._watch
        step.watched = Watched(
            watch.seen.alive[:], dict(watch.seen.flops), watch.seen.moved, watch.seen.operations, watch.seen.peak_module
        )
        step.saved = self._notes.saved
        before = len(watch.seen.alive)
        inner = optimizer.optimizer
        inner.step()
        step.optimizer = _facts(inner, watch.seen.alive[before:], watch.seen.alive[before - 1] if before else (0, 0, 0))
        step.watched.alive = _thinned(step.watched.alive)
        self._answer(step)

    def _answer(self, step: Step) -> None:
        assert self._to_parent is not None, "only forks answer"
        self._inside.pop_all()  # closing it would run the user's own exits; the process ends
        self._to_parent.write(msgspec.json.encode(step))
        self._to_parent.close()
        os._exit(0)


_INIT: Final = facade.Accelerator.__init__
_PREPARE: Final = Preparer.prepare
_MOMENTS: Final = 256


class OneBatch:
    """A loader that gives one batch; whatever else is asked of it, the loader itself answers."""

    def __init__(self, loader: DataLoader[Any], takeover: Takeover) -> None:
        self._loader = loader
        self._takeover = takeover

    def __iter__(self) -> Iterator[Any]:
        yield self._takeover.batch(self._loader)

    def __len__(self) -> int:
        return len(self._loader)

    def __getattr__(self, name: str) -> Any:  # Any: attributes of the user's loader
        return getattr(self._loader, name)


def _decode(content: bytes, run: Run) -> Step:
    try:
        return msgspec.json.decode(content, type=Step)
    except msgspec.DecodeError:
        return Step(run, error="the process that traced it died")


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else "no message"


def _thinned(alive: list[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    """The highest moment of each of some hundred equal spans."""
    span = max(1, -(-len(alive) // _MOMENTS))
    return [max(alive[start : start + span], key=sum) for start in range(0, len(alive), span)]


def _facts(optimizer: Optimizer, alive: list[tuple[int, int, int]], before: tuple[int, int, int]) -> OptimizerFacts:
    """What an optimizer keeps, from its state after the first update, and what it allocated besides while it updated."""
    parameters = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    states: tuple[int, ...] = ()
    counters = 0
    for parameter in parameters[:1]:
        values = [value for value in optimizer.state.get(parameter, {}).values() if isinstance(value, Tensor)]
        states = tuple(value.element_size() for value in values if value.shape == parameter.shape)
        counters = sum(value.numel() * value.element_size() for value in values if value.shape != parameter.shape)
    total = sum(p.numel() * p.element_size() for p in parameters) or 1
    kept = sum(p.numel() for p in parameters) * sum(states)
    highest = max((activations for activations, _, _ in alive), default=0) - before[0]
    return OptimizerFacts(
        name=type(optimizer).__name__,
        states=states,
        counter_bytes=counters,
        passing=max(0.0, (highest - kept) / total),
    )


@contextmanager
def _patched(takeover: Takeover) -> Iterator[None]:
    """Hand the script's Accelerators, `prepare()` and updates to `takeover` inside the block."""
    owner = facade.Accelerator
    build = vars(facade)["build"]
    prepare, loader, step = Preparer.prepare, Preparer.prepare_loader, PreparedOptimizer.step

    def started(self: facade.Accelerator, **given: Any) -> None:  # Any: settings of the script
        takeover.built(self)
        _INIT(self, **given)

    def built(given: Mapping[str, Any], context: Any = None) -> Any:  # Any: as in the function it stands for
        return build(takeover.settings(), context)

    def prepared(
        self: Preparer, objects: tuple[Any, ...], placement: Any = None, train: bool = True
    ) -> tuple[Any, ...]:
        return takeover.prepare(self, objects)

    def loaded(self: Preparer, given: Any, placement: Any = None, slice_fn: Any = None) -> Any:  # Any: likewise
        return OneBatch(given, takeover)

    def stepped(self: PreparedOptimizer, closure: Any = None) -> None:  # Any: likewise
        takeover.step(self)

    with ExitStack() as undo:
        for holder, name, replacement in (
            (owner, "__init__", started),
            (facade, "build", built),
            (Preparer, "prepare", prepared),
            (Preparer, "prepare_loader", loaded),
            (PreparedOptimizer, "step", stepped),
        ):
            setattr(holder, name, replacement)
        for holder, name, original in (
            (owner, "__init__", _INIT),
            (facade, "build", build),
            (Preparer, "prepare", prepare),
            (Preparer, "prepare_loader", loader),
            (PreparedOptimizer, "step", step),
        ):
            undo.callback(setattr, holder, name, original)
        yield
