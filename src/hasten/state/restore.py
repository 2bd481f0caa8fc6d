"""Loading a run's state: everything is checked before anything changes, and a failed load changes nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from hasten.checkpoint.filling import run_copies
from hasten.checkpoint.model_state import LoadReport, ModelPlan, names_elsewhere, plan_model
from hasten.checkpoint.optimizer_state import OptimizerPlan, parameter_names, plan_optimizer
from hasten.checkpoint.reader import Checkpoint
from hasten.checkpoint.reshard import Copy, local_tensor
from hasten.comm.agreement import Agreement
from hasten.errors import CheckpointError, CorruptCheckpointError
from hasten.optim.clock import StepClock
from hasten.optim.ema import AverageState
from hasten.runtime.devices import kind_of
from hasten.runtime.logs import get_logger
from hasten.state import epochs
from hasten.state.rank_state import plan_options
from hasten.state.run_state import RunParts, load_packed, named_buffers, numbered_name, settle_loops
from hasten.state.undo import Stateful, Undo
from hasten.state.window_state import (
    GradientLayout,
    Gradients,
    loss_ranks,
    plan_gradients,
    put_gradients,
    same_data,
    spread_like,
)
from hasten.strategies.base import LoopState

log = get_logger(__name__)


@dataclass(slots=True)
class Restore:
    """Planned changes of a load, checked but not applied yet."""

    parts: RunParts
    models: list[ModelPlan] = field(default_factory=list)
    optimizers: list[OptimizerPlan] = field(default_factory=list)
    stateful: list[tuple[Stateful, Any]] = field(default_factory=list)  # Any: their state
    options: list[list[Mapping[str, Any]]] | None = None
    progress: Mapping[str, Any] = field(default_factory=dict)
    gradients: Gradients | None = None
    unowned: Mapping[str, Tensor] = field(default_factory=dict)
    """Gradients of parameters that no optimizer holds, from windows before the one in progress."""
    buffers: dict[str, Tensor] = field(default_factory=dict)
    same_world: bool = True
    """True if each rank reads the samples that the same rank read in the saved run."""
    seed_generators: Callable[[], None] = lambda: None
    restarted: list[AverageState] = field(default_factory=list)
    """Moving averages that the checkpoint does not hold."""

    @property
    def reports(self) -> list[LoadReport]:
        """Reports of names that did not match, per model."""
        return [plan.report for plan in self.models]

    def apply(self, together: Agreement, undo: Undo) -> None:
        """Apply the changes to the run. `undo` can roll back every change. Ranks: every rank."""
        parts = self.parts
        if self.progress:
            settle_loops(parts, together)
        self._keep(undo)
        for thing, state in self.stateful:
            thing.load_state_dict(state)
        plans: list[ModelPlan | OptimizerPlan] = [*self.models, *self.optimizers]
        run_copies([copy for plan in plans for copy in plan.copies])
        for plan in plans:
            plan.finish()
        for average in self.restarted:
            average.restart()
        for optimizer, groups in zip(parts.objects.optimizers, self.options or [], strict=False):
            for group, own in zip(optimizer.param_groups, groups, strict=True):
                group.update(own)
        if self.progress:
            self._counters()
            self._loops(together)
        self.seed_generators()
        if self.progress and parts.epochs is not None and self.progress["epochs"] is not None:
            parts.epochs.load_state_dict(self.progress["epochs"])
        together.share()  # trackers delete the steps logged since the checkpoint for good: all else must have succeeded
        if self.progress and parts.trackers is not None and self.progress["trackers"] is not None:
            parts.trackers.load_state_dict(self.progress["trackers"])

    def _keep(self, undo: Undo) -> None:
        """Save everything that will change, except the memory of new optimizer state."""
        parts = self.parts
        undo.add("random generators", parts.randomness.holding())
        undo.keep_attributes(parts.clock)
        if parts.clock.unowned is not None:
            undo.keep_attributes(parts.clock.unowned, tensors=False)
        for optimizer in parts.objects.optimizers:
            undo.keep_attributes(optimizer, tensors=False)
            inner = getattr(optimizer, "optimizer", optimizer)
            undo.keep_attributes(inner, tensors=False)
            if callable(keeping := getattr(inner, "keeping", None)):  # an engine's state is outside its attributes
                undo.add("engine", keeping())
        for average in parts.averages:
            undo.keep_attributes(average, tensors=average in self.restarted)
        for scheduler in parts.objects.schedulers:
            undo.keep_attributes(scheduler, tensors=False)
        if parts.precision.scaler is not None:
            undo.keep_attributes(parts.precision.scaler)
        for thing, _ in self.stateful:
            if (track := getattr(getattr(thing, "parts", None), "track", None)) is not None:
                undo.keep_attributes(track)  # an iteration in progress continues; after load_state_dict it would not
            if thing is not parts.precision:
                undo.keep_stateful(thing)
        undo.keep_targets([copy for plan in self.models for copy in plan.copies])
        undo.keep_targets([copy for plan in self.optimizers for copy in _into_live_state(plan)])
        for model in self.models:
            if model.by_method:
                undo.keep_stateful(_PartOf(model.model, model.by_method))
        self._keep_loops(undo)

    def _keep_loops(self, undo: Undo) -> None:
        parts = self.parts
        plain = parts.plain_models()
        names = parameter_names(plain)
        undo.keep_targets([Copy(buffer, self.buffers[name]) for name, buffer in self._own_buffers()])
        gradients = [(p, p.grad) for model in plain for p in model.parameters()]
        loops = [(model, parts.loops.loop_state(model, names, False)) for model in parts.objects.models]

        def put_back() -> None:
            for model, state in loops:
                notes = {key: value for key, value in state.notes.items() if key != "bucket_order"}
                parts.loops.restore_loop_state(model, names, LoopState(notes, state.tensors))
            for parameter, gradient in gradients:
                parameter.grad = gradient

        undo.add("gradients", put_back)

    def _own_buffers(self) -> Iterator[tuple[str, Tensor]]:
        return ((name, buffer) for name, buffer in named_buffers(self.parts.plain_models()) if name in self.buffers)

    def _counters(self) -> None:
        parts, saved = self.parts, self.progress
        for name, buffer in self._own_buffers():
            buffer.copy_(self.buffers[name])
        for optimizer, counts in zip(parts.objects.optimizers, saved["optimizers"], strict=False):
            for key, value in counts.items():
                if hasattr(optimizer, key):
                    setattr(optimizer, key, value)
            optimizer.spent = False  # the used gradients are replaced
        for scheduler, seen in zip(parts.objects.schedulers, saved["schedulers"], strict=False):
            if hasattr(scheduler, "_seen"):
                scheduler._seen = seen

    def _loops(self, together: Agreement) -> None:
        """Restore the wrapped models' loop state, the open window's gradients, and the clock. Ranks: every rank."""
        parts, gradients = self.parts, self.gradients or Gradients()
        plain = parts.plain_models()
        names = parameter_names(plain)
        losses = []
        for model, saved in zip(parts.objects.models, self.progress["loops"], strict=False):
            notes = saved if self.same_world else {key: value for key, value in saved.items() if key != "bucket_order"}
            losses.append(parts.loops.restore_loop_state(model, names, LoopState(notes, gradients.held)))
        shown: list[list[bool]] = together.share([loss is not None for loss in losses])
        for index, loss in enumerate(losses):
            if loss is not None and all(rank[index : index + 1] == [True] for rank in shown):
                loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        put_gradients(plain, names, gradients.of)
        parts.clock.load_state_dict(self.progress["clock"], gradients=self.gradients is not None)
        if parts.clock.unowned is not None:
            live = ((p, self.unowned.get(names[id(p)])) for model in plain for p in model.parameters())
            kept = ((p, spread_like(p, grad)) for p, grad in live if grad is not None)
            parts.clock.unowned.restore(kept, open_window=self.gradients is not None)


class _PartOf:
    """The subset of a module's state that is loaded by its load_state_dict, as an object with state."""

    def __init__(self, module: nn.Module, keys: Mapping[str, Any]) -> None:
        self._module = module
        self._keys = keys

    def state_dict(self) -> dict[str, Any]:
        return {key: value for key, value in self._module.state_dict().items() if key in self._keys}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._module.load_state_dict(state, strict=False)


def _into_live_state(plan: OptimizerPlan) -> Iterator[Copy]:
    """Return the copies that overwrite existing optimizer state; on a lazy device, without addresses, all of them."""
    held = {
        _address(local_tensor(value))
        for state in plan.optimizer.state.values()
        if isinstance(state, dict)
        for value in state.values()
        if isinstance(value, Tensor)
    }
    return (copy for copy in plan.copies if _address(copy.target) in held)


def _address(tensor: Tensor) -> int:
    return 0 if kind_of(tensor.device).lazy else tensor.untyped_storage().data_ptr()


def plan_restore(
    parts: RunParts,
    models: Sequence[nn.Module | None],
    checkpoint: Checkpoint,
    rank: int,
    world_size: int,
    strict: bool,
    mesh: Mapping[str, int] | None = None,
) -> Restore:
    """Check the whole checkpoint against the run. Ranks: each rank independently; changes nothing.

    `models` are the user's modules; None for a model that a load hook handles.
    """
    saved_world = checkpoint.manifest.world_size
    here = GradientLayout(rank, world_size, mesh or checkpoint.manifest.mesh, {})
    plan = Restore(parts, same_world=same_data(checkpoint, here))
    names = parameter_names(parts.plain_models())
    elsewhere = names_elsewhere(parts.plain_models(), names)
    for index, model in enumerate(models):
        if model is not None:
            plan.models.append(plan_model(model, checkpoint.component(numbered_name("model", index)), strict))
    for index, optimizer in enumerate(parts.objects.optimizers):
        found = checkpoint.component(numbered_name("optimizer", index))
        plan.optimizers.append(plan_optimizer(optimizer, names, found, strict, elsewhere))
    for index, average in enumerate(parts.averages):
        if (name := numbered_name("ema", index)) in checkpoint.manifest.components:
            plan.optimizers.append(plan_optimizer(average, names, checkpoint.component(name), strict, elsewhere))
        else:
            log.warning("%s holds no moving average: it starts anew from the loaded weights", checkpoint.folder)
            plan.restarted.append(average)
    _plan_stateful(plan, checkpoint, rank, world_size, strict)
    if "progress" not in checkpoint.manifest.components and checkpoint.manifest.notes.get("partial") is True:
        log.warning("%s was converted: counters, data positions and random states are reset", checkpoint.folder)
        return plan
    # a new rank continues from one that existed
    plan.progress = checked_progress(load_packed(checkpoint, "progress", rank % saved_world))
    plan.options = plan_options(checkpoint, parts.objects.optimizers, rank, world_size)
    if "gradients" in checkpoint.manifest.components:
        _plan_window(plan, checkpoint, here, strict)
    if "unowned_gradients" in checkpoint.manifest.components:
        models = parts.plain_models()
        plan.unowned = plan_gradients(
            checkpoint, models, names, here, weighted=False, strict=strict, component="unowned_gradients"
        ).of
    if plan.same_world:
        if "own_buffers" in checkpoint.manifest.components:
            plan.buffers = load_packed(checkpoint, "own_buffers", rank)
        plan.seed_generators = parts.randomness.restoring(load_packed(checkpoint, "random_states", rank), strict)
    else:
        step = checkpoint.manifest.step or 0
        plan.seed_generators = parts.randomness.deriving(load_packed(checkpoint, "random_states", 0), rank, step)
        log.warning(
            "the checkpoint was saved by %d processes and is loaded by %d: random states are derived anew from "
            "(seed, rank, step=%d), so dropout differs from an uninterrupted run; data order and tensors continue",
            saved_world,
            world_size,
            step,
        )
    return plan


def _plan_stateful(plan: Restore, checkpoint: Checkpoint, rank: int, world_size: int, strict: bool) -> None:
    parts = plan.parts
    saved_world = checkpoint.manifest.world_size
    source = rank % saved_world
    wanted: list[tuple[str, Stateful]] = []
    wanted += [(numbered_name("scheduler", i), s) for i, s in enumerate(parts.objects.schedulers)]
    wanted += [(numbered_name("loader", i), x) for i, x in enumerate(parts.objects.loaders)]
    wanted += [(f"custom_checkpoint_{i}", x) for i, x in enumerate(parts.registered)]
    partial = checkpoint.manifest.notes.get("partial") is True
    known = checkpoint.manifest.components
    wanted = [item for item in wanted if not partial or item[0] in known]
    for name, thing in wanted:
        owner = source
        if saved_world != world_size and name in known and known[name].per_rank and not name.startswith("loader"):
            owner = _heir(name, thing, checkpoint, source, world_size, strict)
        state = load_packed(checkpoint, name, owner)
        if not isinstance(state, Mapping) and not name.startswith("custom_checkpoint"):
            raise CorruptCheckpointError(
                f"{checkpoint.folder}: {name} holds a {type(state).__name__} instead of a state dict. Nothing was "
                "loaded; use another checkpoint."
            )
        plan.stateful.append((thing, state))
    scaler = parts.precision.scaler
    if scaler is not None and scaler.is_enabled() and not (partial and "scaler" not in known):
        plan.stateful.append((parts.precision, load_packed(checkpoint, "scaler", None)))


def _heir(name: str, thing: object, checkpoint: Checkpoint, source: int, world_size: int, strict: bool) -> int:
    """Return the old rank whose state this rank loads, when states differed and the world size has changed.

    Raises: CheckpointError for a registered object, when strict: hasten cannot redistribute its state.
    """
    saved_world = checkpoint.manifest.world_size
    if name.startswith("scheduler"):
        log.warning(
            "%s differed between the %d processes that saved %s; all %d processes now take that of rank 0",
            name,
            saved_world,
            checkpoint.folder,
            world_size,
        )
        return 0
    if strict:
        raise CheckpointError(
            f"{checkpoint.folder}: the {type(thing).__name__} registered for checkpointing ({name}) had a state of its own "
            f"on each of the {saved_world} processes, which cannot be split over {world_size}. Nothing was loaded. "
            f"Resume on {saved_world} processes, make its state equal on every rank before saving, or load with "
            f"strict=False: rank r then takes the state of rank r % {saved_world}."
        )
    log.warning("%s: rank r takes the state that rank r %% %d had saved", name, saved_world)
    return source


def _plan_window(plan: Restore, checkpoint: Checkpoint, here: GradientLayout, strict: bool) -> None:
    """Plan the gradients of the window in progress, and the clock that counts them."""
    parts = plan.parts
    models = parts.plain_models()
    names = parameter_names(models)
    scaler = parts.precision.scaler
    if ("scaler" in checkpoint.manifest.components) != (scaler is not None and scaler.is_enabled()):
        raise CheckpointError(
            f"{checkpoint.folder} was saved inside an accumulation window "
            f"{'with' if scaler is None else 'without'} loss scaling (mixed_precision='fp16'), and this run is "
            f"{'without' if scaler is None else 'with'} it, so the window's gradients would be off by the scale. Nothing was "
            "loaded. Resume in the precision it was saved in, or save where a window ends (accelerator.sync_gradients)."
        )
    groups: dict[str, list[str]] = {}
    for model in parts.objects.models:
        groups |= parts.loops.loop_state(model, names, False).notes.get("groups", {})
    here = GradientLayout(here.rank, here.world_size, here.mesh, groups)
    weighted = any(window["weighted"] for window in plan.progress["clock"]["windows"])
    plan.gradients = plan_gradients(checkpoint, models, names, here, weighted=weighted, strict=strict)
    if not plan.same_world:
        plan.progress = {**plan.progress, "clock": _mean_clock(checkpoint, here, plan.progress["clock"])}


def checked_progress(saved: Any) -> dict[str, Any]:  # Any: content of the file
    """Return the counters of a run, after testing them on an unused clock.

    Raises: CorruptCheckpointError when `collect` did not write them.
    """
    try:
        StepClock().load_state_dict(saved["clock"], gradients=True)
        return {
            "clock": saved["clock"],
            "trackers": saved["trackers"],
            "optimizers": [{str(key): int(value) for key, value in counts.items()} for counts in saved["optimizers"]],
            "schedulers": [int(value) for value in saved["schedulers"]],
            "loops": [_checked_loop(notes) for notes in _loops_of(saved)],
            "epochs": None if saved.get("epochs") is None else epochs.checked(saved["epochs"]),
        }
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CorruptCheckpointError(
            f"the counters of the run cannot be read ({type(error).__name__}: {error}). Nothing was loaded; use another "
            "checkpoint."
        ) from error


def _loops_of(saved: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    if "loops" in saved:
        return list(saved["loops"])
    pairs = zip(saved["bucket_order"], saved["buffer_sync"], strict=True)  # the format of early versions
    return [{"bucket_order": order, "buffer_sync": flag} for order, flag in pairs]


def _checked_loop(notes: Mapping[str, Any]) -> dict[str, Any]:
    order, flag = notes.get("bucket_order"), notes.get("buffer_sync")
    checked: dict[str, Any] = {"buffer_sync": None if flag is None else bool(flag)}
    if "bucket_order" in notes:
        checked["bucket_order"] = None if order is None else [int(number) for number in order]
    return checked


def _mean_clock(checkpoint: Checkpoint, here: GradientLayout, clock: dict[str, Any]) -> dict[str, Any]:
    """Return the clock with the window's total weight split evenly over the ranks that average their losses."""
    manifest = checkpoint.manifest
    others = [load_packed(checkpoint, "progress", other)["clock"]["windows"] for other in range(manifest.world_size)]
    if len({len(windows) for windows in others}) != 1:
        raise CheckpointError(
            f"the {manifest.world_size} ranks of the checkpoint were in different accumulation windows, which cannot be "
            f"split over {here.world_size}. Nothing was loaded. Resume on {manifest.world_size} processes."
        )
    copies = manifest.world_size / loss_ranks(manifest.mesh, manifest.world_size)  # ranks that read the same samples
    each = 1 / (copies * loss_ranks(here.mesh, here.world_size))
    windows = [
        {**window, "weight": sum(other[i]["weight"] for other in others) * each}
        for i, window in enumerate(clock["windows"])
    ]
    return {**clock, "windows": windows}
