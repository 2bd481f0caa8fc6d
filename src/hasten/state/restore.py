"""Loading a run's state: everything is checked before anything changes, and a failed load changes nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from hasten.checkpoint.reader import Checkpoint
from hasten.checkpoint.reshard import Copy, run_copies
from hasten.checkpoint.state_dicts import (
    ModelPlan,
    OptimizerPlan,
    names_elsewhere,
    parameter_names,
    plan_model,
    plan_optimizer,
)
from hasten.comm.agreement import Agreement
from hasten.data.loader import Loader
from hasten.errors import CheckpointError, CorruptCheckpointError
from hasten.modules.names import local_tensor
from hasten.optim.clock import StepClock
from hasten.optim.ema import AverageState
from hasten.optim.optimizer import settle_state
from hasten.optim.scheduler import steps_reached
from hasten.runtime.devices import kind_of
from hasten.runtime.logs import get_logger
from hasten.state import epochs
from hasten.state.previous_state import PreviousState, Stateful
from hasten.state.rank_state import OPTIONS, plan_options
from hasten.state.run_state import RunObjects, load_packed, named_buffers, numbered_name, run_postponed
from hasten.state.window_state import (
    GradientLayout,
    Gradients,
    loss_ranks,
    plan_gradients,
    spread_like,
)
from hasten.strategies.base import LoopState

log = get_logger(__name__)


@dataclass(slots=True)
class RestorePlan:
    """Planned changes of a load, checked but not applied yet."""

    parts: RunObjects
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
    seed_generators: Callable[[], object] | None = None
    restarted: list[AverageState] = field(default_factory=list)
    """Moving averages that the checkpoint does not hold."""

    def restart(self, average: AverageState, checkpoint: Checkpoint) -> None:
        """Let a moving average that the checkpoint lacks start anew from the loaded weights."""
        log.warning("%s holds no moving average: it starts anew from the loaded weights", checkpoint.folder)
        self.restarted.append(average)

    def apply(self, together: Agreement, previous: PreviousState) -> None:
        """Apply the changes to the run; `previous` saves every value before it changes. Ranks: every rank."""
        parts = self.parts
        if self.progress:
            run_postponed(parts, together)
        self._save_previous(previous)
        for thing, state in self.stateful:
            thing.load_state_dict(state)
        plans: list[ModelPlan | OptimizerPlan] = [*self.models, *self.optimizers]
        copies: list[Copy] = []
        for plan in plans:
            copies += plan.copies
        run_copies(copies)
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
        if self.seed_generators is not None:
            self.seed_generators()
        if self.progress and parts.epochs is not None and self.progress["epochs"] is not None:
            parts.epochs.load_state_dict(self.progress["epochs"])
        together.share()  # trackers delete the steps logged since the checkpoint for good: all else must have succeeded
        if self.progress and parts.trackers is not None and self.progress["trackers"] is not None:
            parts.trackers.load_state_dict(self.progress["trackers"])

    def _save_previous(self, previous: PreviousState) -> None:
        """Save everything that will change, except the memory of new optimizer state."""
        parts = self.parts
        previous.add("random generators", parts.randomness.holding())
        previous.save_attributes(parts.clock)
        previous.save_attributes(parts.clock.weights)
        if parts.clock.unowned is not None:
            previous.save_attributes(parts.clock.unowned, tensors=False)
        for optimizer in parts.objects.optimizers:
            previous.save_attributes(optimizer, tensors=False)
            inner = getattr(optimizer, "optimizer", optimizer)
            previous.save_attributes(inner, tensors=False)
            if callable(keeping := getattr(inner, "keeping", None)):  # an engine's state is outside its attributes
                previous.add("engine", keeping())
        for average in parts.averages:
            previous.save_attributes(average, tensors=average in self.restarted)
        for scheduler in parts.objects.schedulers:
            previous.save_attributes(scheduler, tensors=False)
        if parts.precision.scaler is not None:
            previous.save_attributes(parts.precision.scaler)
        for thing, _ in self.stateful:
            if isinstance(thing, Loader):  # an iteration in progress continues; after load_state_dict it would not
                previous.save_attributes(thing.parts.iteration)
            elif thing is not parts.precision:
                previous.save_stateful(thing)
        self._save_tensors(previous)

    def _save_tensors(self, previous: PreviousState) -> None:
        """Save the tensors that are overwritten in place, the gradients, and the loop state of wrapped models."""
        parts = self.parts
        copies: list[Copy] = []
        for model_plan in self.models:
            copies += model_plan.copies
            if model_plan.by_method:
                previous.save_stateful(_StateSubset(model_plan.model, model_plan.by_method))
        for plan in self.optimizers:
            copies += _into_live_state(plan)
        if self.buffers:
            copies += [Copy(buffer, self.buffers[name]) for name, buffer in self._own_buffers()]
        previous.save_targets(copies)
        plain = parts.plain_models()
        names = parameter_names(plain)
        gradients, loops = [], []
        for model in plain:
            for parameter in model.parameters():
                gradients.append((parameter, parameter.grad))
        for model in parts.objects.models:
            loops.append((model, parts.loops.loop_state(model, names, False)))

        def restore() -> None:
            for model, state in loops:
                notes = {key: value for key, value in state.notes.items() if key != "bucket_order"}
                parts.loops.restore_loop_state(model, names, LoopState(notes, state.tensors))
            for parameter, gradient in gradients:
                parameter.grad = gradient

        previous.add("gradients", restore)

    def _own_buffers(self) -> list[tuple[str, Tensor]]:
        return [(name, tensor) for name, tensor in named_buffers(self.parts.plain_models()) if name in self.buffers]

    def _counters(self) -> None:
        parts, saved = self.parts, self.progress
        for name, buffer in self._own_buffers() if self.buffers else ():
            buffer.copy_(self.buffers[name])
        for optimizer, counts in zip(parts.objects.optimizers, saved["optimizers"], strict=False):
            for key, value in counts.items():
                if hasattr(optimizer, key):
                    setattr(optimizer, key, value)
            optimizer.spent = False  # the used gradients are replaced
        for scheduler, seen in zip(parts.objects.schedulers, saved["schedulers"], strict=False):
            if "_seen" in vars(scheduler):
                scheduler._seen = seen
        if not self.same_world:
            self._place_schedules()

    def _place_schedules(self) -> None:
        """Move schedules that the script made for its number of processes to where the data is."""
        parts, open_epochs = self.parts, list[tuple[int, int]]()
        for loader in parts.objects.loaders:
            num_batches, num_done = loader.parts.source.steps() or 0, loader.num_done
            if 0 < num_done < num_batches:
                every = parts.clock.every
                open_epochs.append((-(-num_batches // every), -(-(num_batches - num_done) // every)))
        for scheduler, saved in zip(parts.objects.schedulers, self.progress["schedule_lengths"], strict=False):
            length = getattr(scheduler, "length", None)
            if saved and length and saved != length:
                reached = steps_reached(scheduler.scheduler.last_epoch, saved, length, open_epochs)
                scheduler.continue_at(reached)
                log.warning(
                    "the schedule of %d steps continues after %d, as that of %d steps which was saved would",
                    length,
                    reached,
                    saved,
                )

    def _loops(self, together: Agreement) -> None:
        """Restore the wrapped models' loop state, the open window's gradients, and the clock. Ranks: every rank."""
        parts, gradients = self.parts, self.gradients or Gradients()
        plain = parts.plain_models()
        names = parameter_names(plain)
        losses = []
        for model, saved in zip(parts.objects.models, self.progress["loops"], strict=False):
            notes = dict(saved)
            if not self.same_world:
                notes.pop("bucket_order", None)
            losses.append(parts.loops.restore_loop_state(model, names, LoopState(notes, gradients.held)))
        shown: list[list[bool]] = together.share(list(map(torch.is_tensor, losses)))
        for index, loss in enumerate(losses):
            if loss is not None and all(rank[index : index + 1] == [True] for rank in shown):
                loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        for model in plain:
            for parameter in model.parameters():
                gradient = gradients.of.get(names[id(parameter)])
                parameter.grad = None if gradient is None else spread_like(parameter, gradient)
        parts.clock.load_state_dict(self.progress["clock"], gradients=self.gradients is not None)
        if parts.clock.unowned is not None:
            live = ((p, self.unowned.get(names[id(p)])) for model in plain for p in model.parameters())
            kept = ((p, spread_like(p, grad)) for p, grad in live if grad is not None)
            parts.clock.unowned.restore(kept, open_window=self.gradients is not None)


class _StateSubset:
    """The subset of a module's state that is loaded by its load_state_dict, as an object with state."""

    def __init__(self, module: nn.Module, keys: Mapping[str, Any]) -> None:
        self._module = module
        self._keys = keys

    def state_dict(self) -> dict[str, Any]:
        return {key: value for key, value in self._module.state_dict().items() if key in self._keys}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._module.load_state_dict(state, strict=False)


def _into_live_state(plan: OptimizerPlan) -> list[Copy]:
    """Return the copies that overwrite existing optimizer state; on a lazy device, without addresses, all of them."""
    held: set[int] = set()
    for state in plan.optimizer.state.values():
        for value in state.values() if isinstance(state, dict) else ():
            if isinstance(value, Tensor):
                held.add(_address(local_tensor(value)))
    live = []
    for copy in plan.copies:
        if _address(copy.target) in held:
            live.append(copy)
    return live


def _address(tensor: Tensor) -> int:
    lazy = tensor.device.type != "cpu" and kind_of(tensor.device).lazy
    return 0 if lazy else tensor.untyped_storage().data_ptr()


def plan_restore(
    parts: RunObjects,
    models: Sequence[nn.Module | None],
    checkpoint: Checkpoint,
    rank: int,
    world_size: int,
    strict: bool,
    mesh: Mapping[str, int] | None = None,
) -> RestorePlan:
    """Check the whole checkpoint against the run. Ranks: each rank independently; changes nothing.

    `models` are the user's modules; None for a model that a load hook handles.
    """
    saved_world = checkpoint.manifest.world_size
    here = GradientLayout(rank, world_size, mesh or checkpoint.manifest.mesh, {})
    plan = RestorePlan(parts, same_world=checkpoint.same_data(world_size, here.mesh))
    plain = parts.plain_models()
    names = parameter_names(plain)
    elsewhere = names_elsewhere(plain, names)
    for index, model in enumerate(models):
        if model is not None:
            plan.models.append(plan_model(model, checkpoint.component(numbered_name("model", index)), strict))
    for index, optimizer in enumerate(parts.objects.optimizers):
        found = checkpoint.component(numbered_name("optimizer", index))
        inner = settle_state(getattr(optimizer, "optimizer", optimizer))
        plan.optimizers.append(plan_optimizer(inner, names, found, strict, elsewhere))
    for index, average in enumerate(parts.averages):
        average.refuse_if_swapped("load_state()")
        if (name := numbered_name("ema", index)) in checkpoint.manifest.components:
            plan.optimizers.append(plan_optimizer(average, names, checkpoint.component(name), strict, elsewhere))
        else:
            plan.restart(average, checkpoint)
    _plan_stateful(plan, checkpoint, rank, world_size, strict)
    if "progress" not in checkpoint.manifest.components and checkpoint.manifest.notes.get("partial") is True:
        log.warning("%s was converted: counters, data positions and random states are reset", checkpoint.folder)
        return plan
    # a new rank continues from one that existed
    plan.progress = checked_progress(load_packed(checkpoint, "progress", rank % saved_world))
    if OPTIONS in checkpoint.manifest.components:
        plan.options = plan_options(checkpoint, parts.objects.optimizers, rank, world_size)
    if "gradients" in checkpoint.manifest.components:
        _plan_window(plan, checkpoint, here, strict)
    if "unowned_gradients" in checkpoint.manifest.components:
        plan.unowned = plan_gradients(
            checkpoint, plain, names, here, weighted=False, strict=strict, component="unowned_gradients"
        ).of
    if plan.same_world:
        if "own_buffers" in checkpoint.manifest.components:
            plan.buffers = load_packed(checkpoint, "own_buffers", rank)
        plan.seed_generators = parts.randomness.restoring(load_packed(checkpoint, "random_states", rank), strict)
    else:
        step = checkpoint.manifest.step or 0
        plan.seed_generators = parts.randomness.deriving(load_packed(checkpoint, "random_states", 0), rank, step)
        words = (
            "the checkpoint was saved by %d processes and is loaded by %d: random states are derived anew from "
            "(seed, rank, step=%d), so dropout differs from an uninterrupted run; data order and tensors continue"
        )
        log.warning(words, saved_world, world_size, step)
    return plan


def _plan_stateful(plan: RestorePlan, checkpoint: Checkpoint, rank: int, world_size: int, strict: bool) -> None:
    parts = plan.parts
    saved_world = checkpoint.manifest.world_size
    source = rank % saved_world
    wanted: list[tuple[str, Stateful]] = []
    for index, scheduler in enumerate(parts.objects.schedulers):
        wanted.append((numbered_name("scheduler", index), getattr(scheduler, "scheduler", scheduler)))
    for index, loader in enumerate(parts.objects.loaders):
        wanted.append((numbered_name("loader", index), loader))
    for index, registered in enumerate(parts.registered):
        wanted.append((f"custom_checkpoint_{index}", registered))
    converted = checkpoint.manifest.notes.get("partial") is True
    known = checkpoint.manifest.components
    for name, thing in wanted:
        if converted and name not in known:
            continue
        owner = source
        if saved_world != world_size and name in known and known[name].per_rank and not name.startswith("loader"):
            owner = _saved_rank(name, thing, checkpoint, source, world_size, strict)
        state = load_packed(checkpoint, name, owner)
        if not isinstance(state, Mapping) and not name.startswith("custom_checkpoint"):
            raise CorruptCheckpointError(
                f"{checkpoint.folder}: {name} holds a {type(state).__name__} instead of a state dict. Nothing was "
                "loaded; use another checkpoint."
            )
        plan.stateful.append((thing, state))
    scaler = parts.precision.scaler
    if scaler is not None and scaler.is_enabled() and not (converted and "scaler" not in known):
        plan.stateful.append((parts.precision, load_packed(checkpoint, "scaler", None)))


def _saved_rank(name: str, thing: object, checkpoint: Checkpoint, source: int, world_size: int, strict: bool) -> int:
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
            f"{checkpoint.folder}: the {type(thing).__name__} registered for checkpointing ({name}) had a different state "
            f"on each of the {saved_world} processes, which cannot be split over {world_size}. Nothing was loaded. "
            f"Resume on {saved_world} processes, make its state equal on every rank before saving, or load with "
            f"strict=False: rank r then takes the state of rank r % {saved_world}."
        )
    log.warning("%s: rank r takes the state that rank r %% %d had saved", name, saved_world)
    return source


def _plan_window(plan: RestorePlan, checkpoint: Checkpoint, here: GradientLayout, strict: bool) -> None:
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
        counts: list[dict[str, int]] = []
        for values in saved["optimizers"]:
            counts.append(dict(zip(map(str, values), map(int, values.values()), strict=True)))
        return {
            "clock": saved["clock"],
            "trackers": saved["trackers"],
            "optimizers": counts,
            "schedulers": list(map(int, saved["schedulers"])),
            "schedule_lengths": list(map(int, (length or 0 for length in saved.get("schedule_lengths", ())))),
            "loops": list(map(_checked_loop, saved["loops"])),
            "epochs": None if saved.get("epochs") is None else epochs.checked(saved["epochs"]),
        }
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CorruptCheckpointError(
            f"the counters of the run cannot be read ({type(error).__name__}: {error}). Nothing was loaded; use another "
            "checkpoint."
        ) from error


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
