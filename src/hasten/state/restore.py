"""Loading a run's state: everything is checked before anything changes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from hasten.checkpoint.reader import Checkpoint
from hasten.checkpoint.reshard import Copy, run_copies
from hasten.checkpoint.state_dicts import (
    ModelPlan,
    OptimizerPlan,
    find_other_stage_names,
    parameter_names,
    plan_model,
    plan_optimizer,
)
from hasten.comm.agreement import Agreement
from hasten.data.loader import Loader
from hasten.errors import CheckpointError, CorruptCheckpointError, PrepareError
from hasten.optim.ema import AverageState
from hasten.optim.engine import EngineOptimizer
from hasten.optim.optimizer import settle_state
from hasten.optim.scheduler import steps_reached
from hasten.runtime.logs import get_logger
from hasten.state.run_state import (
    RunObjects,
    Stateful,
    load_packed,
    named_buffers,
    numbered_name,
)

log = get_logger(__name__)


@dataclass(slots=True)
class RestorePlan:
    """Planned changes of a load, checked but not applied yet."""

    parts: RunObjects
    models: list[ModelPlan] = field(default_factory=list)
    optimizers: list[OptimizerPlan] = field(default_factory=list)
    # Any: their state
    stateful: list[tuple[Stateful, Any]] = field(default_factory=list)
    progress: Mapping[str, Any] = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)
    same_world: bool = True
    """True if each rank reads the samples that the same rank read in the saved run."""
    seed_generators: Callable[[], object] | None = None
    restarted: list[AverageState] = field(default_factory=list)
    """Moving averages that the checkpoint does not hold."""

    def restart(self, average: AverageState, checkpoint: Checkpoint) -> None:
        """Let a moving average that the checkpoint lacks start anew from the loaded weights."""
        log.warning(
            "%s holds no moving average: it starts anew from the loaded weights",
            checkpoint.folder,
        )
        self.restarted.append(average)

    def apply(self, agreement: Agreement) -> None:
        """Change the run. Ranks: every rank. Raises: CheckpointError for a failure in the middle, after which the run must end."""
        try:
            self._apply(agreement)
        # of any type, also of users' objects: the run holds parts of two states
        except Exception as error:
            if getattr(error, "agreed", False):
                raise
            raise CheckpointError(
                f"load_state() failed while it changed the run ({type(error).__name__}: {error}), which now holds parts of two states. End this "
                "process, and load again in a new one."
            ) from error

    def _apply(self, agreement: Agreement) -> None:
        run_objects = self.parts
        for stateful_object, saved_state in self.stateful:
            stateful_object.load_state_dict(saved_state)
        object_plans: list[ModelPlan | OptimizerPlan] = [*self.models, *self.optimizers]
        copies: list[Copy] = []
        for object_plan in object_plans:
            copies += object_plan.copies
        run_copies(copies)
        for object_plan in object_plans:
            object_plan.finish()
            if isinstance(object_plan, OptimizerPlan) and isinstance(
                object_plan.optimizer, EngineOptimizer
            ):
                object_plan.optimizer.refresh()
        for average in self.restarted:
            average.restart()
        if self.progress:
            self._restore_progress()
        if self.seed_generators is not None:
            self.seed_generators()
        if (
            self.progress
            and run_objects.epochs is not None
            and self.progress.get("epochs") is not None
        ):
            run_objects.epochs.load_state_dict(self.progress["epochs"])
        # trackers delete the steps logged since the checkpoint for good: all else must have succeeded
        agreement.share()
        if (
            self.progress
            and run_objects.trackers is not None
            and self.progress["trackers"] is not None
        ):
            run_objects.trackers.load_state_dict(self.progress["trackers"])

    def _restore_progress(self) -> None:
        """Restore counters and buffers of this rank, and begin a window without gradients."""
        run_objects = self.parts
        saved_progress = self.progress
        for buffer_name, buffer in (
            named_buffers(run_objects.plain_models()) if self.buffers else ()
        ):
            if buffer_name in self.buffers:
                buffer.copy_(self.buffers[buffer_name])
        for optimizer, saved_counts in zip(
            run_objects.objects.optimizers, saved_progress["optimizers"], strict=False
        ):
            for counter_name, counter_value in saved_counts.items():
                if hasattr(optimizer, counter_name):
                    setattr(optimizer, counter_name, counter_value)
            optimizer.spent = False
        for scheduler, num_seen in zip(
            run_objects.objects.schedulers, saved_progress["schedulers"], strict=False
        ):
            if "_seen" in vars(scheduler):
                scheduler._seen = num_seen
        if not self.same_world:
            self._place_schedules()
        for model in run_objects.objects.models:
            run_objects.drop_gradients(model)
        run_objects.clock.load_state_dict(saved_progress["clock"])

    def _place_schedules(self) -> None:
        """Move schedules that the script made for its number of processes to where the data is."""
        run_objects = self.parts
        open_epochs = list[tuple[int, int]]()
        for loader in run_objects.objects.loaders:
            num_batches = loader.parts.source.steps() or 0
            num_done = loader.num_done
            if 0 < num_done < num_batches:
                window_steps = run_objects.clock.every
                open_epochs.append(
                    (
                        -(-num_batches // window_steps),
                        -(-(num_batches - num_done) // window_steps),
                    )
                )
        for scheduler, saved_length in zip(
            run_objects.objects.schedulers,
            self.progress.get("schedule_lengths", ()),
            strict=False,
        ):
            own_length = getattr(scheduler, "length", None)
            if saved_length and own_length and saved_length != own_length:
                num_reached = steps_reached(
                    scheduler.scheduler.last_epoch,
                    saved_length,
                    own_length,
                    open_epochs,
                )
                scheduler.continue_at(num_reached)
                log.warning(
                    "the schedule of %d steps continues after %d, as that of %d steps which was saved would",
                    own_length,
                    num_reached,
                    saved_length,
                )


def plan_restore(
    run_objects: RunObjects,
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
    if not run_objects.objects.models and "model" in checkpoint.manifest.components:
        raise PrepareError(
            f"load_state() was called before prepare(), so there is no model to load {checkpoint.folder} into. Nothing was loaded. Prepare the model, "
            "the optimizer and the loaders first."
        )
    restore_plan = RestorePlan(
        run_objects,
        same_world=checkpoint.same_data(world_size, mesh or checkpoint.manifest.mesh),
    )
    plain_models = run_objects.plain_models()
    names_by_id = parameter_names(plain_models)
    other_stage_names = find_other_stage_names(plain_models, names_by_id)
    for index, model in enumerate(models):
        if model is not None:
            restore_plan.models.append(
                plan_model(
                    model, checkpoint.component(numbered_name("model", index)), strict
                )
            )
    for index, optimizer in enumerate(run_objects.objects.optimizers):
        stored_component = checkpoint.component(numbered_name("optimizer", index))
        inner_optimizer = settle_state(getattr(optimizer, "optimizer", optimizer))
        restore_plan.optimizers.append(
            plan_optimizer(
                inner_optimizer,
                names_by_id,
                stored_component,
                strict,
                other_stage_names,
            )
        )
    for index, average in enumerate(run_objects.averages):
        average.refuse_if_swapped("load_state()")
        component_name = numbered_name("ema", index)
        if component_name in checkpoint.manifest.components:
            restore_plan.optimizers.append(
                plan_optimizer(
                    average,
                    names_by_id,
                    checkpoint.component(component_name),
                    strict,
                    other_stage_names,
                )
            )
        else:
            restore_plan.restart(average, checkpoint)
    _plan_stateful(restore_plan, checkpoint, rank, world_size, strict)
    if (
        "progress" not in checkpoint.manifest.components
        and checkpoint.manifest.notes.get("partial") is True
    ):
        log.warning(
            "%s was converted: counters, data positions and random states are reset",
            checkpoint.folder,
        )
        return restore_plan
    # a new rank continues from one that existed
    restore_plan.progress = load_packed(checkpoint, "progress", rank % saved_world)
    if restore_plan.same_world:
        if "own_buffers" in checkpoint.manifest.components:
            restore_plan.buffers = load_packed(checkpoint, "own_buffers", rank)
        restore_plan.seed_generators = run_objects.randomness.restoring(
            load_packed(checkpoint, "random_states", rank), strict
        )
    else:
        saved_step = checkpoint.manifest.step or 0
        restore_plan.seed_generators = run_objects.randomness.deriving(
            load_packed(checkpoint, "random_states", 0), rank, saved_step
        )
        warning_text = (
            "the checkpoint was saved by %d processes and is loaded by %d: random states are derived anew from "
            "(seed, rank, step=%d), so dropout differs from an uninterrupted run; data order and tensors continue"
        )
        log.warning(warning_text, saved_world, world_size, saved_step)
    return restore_plan


def _plan_stateful(
    restore_plan: RestorePlan,
    checkpoint: Checkpoint,
    rank: int,
    world_size: int,
    strict: bool,
) -> None:
    run_objects = restore_plan.parts
    saved_world = checkpoint.manifest.world_size
    named_objects: list[tuple[str, Stateful]] = []
    for index, scheduler in enumerate(run_objects.objects.schedulers):
        named_objects.append(
            (
                numbered_name("scheduler", index),
                getattr(scheduler, "scheduler", scheduler),
            )
        )
    for index, loader in enumerate(run_objects.objects.loaders):
        named_objects.append((numbered_name("loader", index), loader))
    for index, registered_object in enumerate(run_objects.registered):
        named_objects.append((f"custom_checkpoint_{index}", registered_object))
    is_converted = checkpoint.manifest.notes.get("partial") is True
    component_records = checkpoint.manifest.components
    for component_name, stateful_object in named_objects:
        if is_converted and component_name not in component_records:
            continue
        if (
            saved_world != world_size
            and component_name in component_records
            and component_records[component_name].per_rank
            and not component_name.startswith("loader")
        ):
            if strict:
                raise CheckpointError(
                    f"{checkpoint.folder}: the {type(stateful_object).__name__} registered for checkpointing ({component_name}) had a different state "
                    f"on each of the {saved_world} processes, which cannot be split over {world_size}. Nothing was loaded. "
                    f"Resume on {saved_world} processes, make its state equal on every rank before saving, or load with "
                    f"strict=False: rank r then takes the state of rank r % {saved_world}."
                )
            log.warning(
                "%s: rank r takes the state that rank r %% %d had saved",
                component_name,
                saved_world,
            )
        saved_state = load_packed(checkpoint, component_name, rank % saved_world)
        if not isinstance(saved_state, Mapping) and not component_name.startswith(
            "custom_checkpoint"
        ):
            raise CorruptCheckpointError(
                f"{checkpoint.folder}: {component_name} holds a {type(saved_state).__name__} instead of a state dict. Nothing was "
                "loaded; use another checkpoint."
            )
        if isinstance(stateful_object, Loader):
            stateful_object.checked(saved_state)
        restore_plan.stateful.append((stateful_object, saved_state))
    scaler = run_objects.precision.scaler
    if (
        scaler is not None
        and scaler.is_enabled()
        and not (is_converted and "scaler" not in component_records)
    ):
        restore_plan.stateful.append(
            (run_objects.precision, load_packed(checkpoint, "scaler", None))
        )
