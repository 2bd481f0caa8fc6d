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
    names_elsewhere,
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

    def apply(self, together: Agreement) -> None:
        """Change the run. Ranks: every rank. Raises: CheckpointError for a failure in the middle, after which the run must end."""
        try:
            self._apply(together)
        # of any type, also of users' objects: the run holds parts of two states
        except Exception as error:
            if getattr(error, "agreed", False):
                raise
            raise CheckpointError(
                f"load_state() failed while it changed the run ({type(error).__name__}: {error}), which now holds parts of two states. End this "
                "process, and load again in a new one."
            ) from error

    def _apply(self, together: Agreement) -> None:
        parts = self.parts
        for thing, state in self.stateful:
            thing.load_state_dict(state)
        plans: list[ModelPlan | OptimizerPlan] = [*self.models, *self.optimizers]
        copies: list[Copy] = []
        for plan in plans:
            copies += plan.copies
        run_copies(copies)
        for plan in plans:
            plan.finish()
            if isinstance(plan, OptimizerPlan) and isinstance(
                plan.optimizer, EngineOptimizer
            ):
                plan.optimizer.refresh()
        for average in self.restarted:
            average.restart()
        if self.progress:
            self._restore_progress()
        if self.seed_generators is not None:
            self.seed_generators()
        if (
            self.progress
            and parts.epochs is not None
            and self.progress.get("epochs") is not None
        ):
            parts.epochs.load_state_dict(self.progress["epochs"])
        # trackers delete the steps logged since the checkpoint for good: all else must have succeeded
        together.share()
        if (
            self.progress
            and parts.trackers is not None
            and self.progress["trackers"] is not None
        ):
            parts.trackers.load_state_dict(self.progress["trackers"])

    def _restore_progress(self) -> None:
        """Restore counters and buffers of this rank, and begin a window without gradients."""
        parts, saved = self.parts, self.progress
        for name, buffer in named_buffers(parts.plain_models()) if self.buffers else ():
            if name in self.buffers:
                buffer.copy_(self.buffers[name])
        for optimizer, counts in zip(
            parts.objects.optimizers, saved["optimizers"], strict=False
        ):
            for key, value in counts.items():
                if hasattr(optimizer, key):
                    setattr(optimizer, key, value)
            optimizer.spent = False
        for scheduler, seen in zip(
            parts.objects.schedulers, saved["schedulers"], strict=False
        ):
            if "_seen" in vars(scheduler):
                scheduler._seen = seen
        if not self.same_world:
            self._place_schedules()
        for model in parts.objects.models:
            parts.drop_gradients(model)
        parts.clock.load_state_dict(saved["clock"])

    def _place_schedules(self) -> None:
        """Move schedules that the script made for its number of processes to where the data is."""
        parts, open_epochs = self.parts, list[tuple[int, int]]()
        for loader in parts.objects.loaders:
            num_batches, num_done = loader.parts.source.steps() or 0, loader.num_done
            if 0 < num_done < num_batches:
                every = parts.clock.every
                open_epochs.append(
                    (-(-num_batches // every), -(-(num_batches - num_done) // every))
                )
        for scheduler, saved in zip(
            parts.objects.schedulers,
            self.progress.get("schedule_lengths", ()),
            strict=False,
        ):
            length = getattr(scheduler, "length", None)
            if saved and length and saved != length:
                reached = steps_reached(
                    scheduler.scheduler.last_epoch, saved, length, open_epochs
                )
                scheduler.continue_at(reached)
                log.warning(
                    "the schedule of %d steps continues after %d, as that of %d steps which was saved would",
                    length,
                    reached,
                    saved,
                )


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
    if not parts.objects.models and "model" in checkpoint.manifest.components:
        raise PrepareError(
            f"load_state() was called before prepare(), so there is no model to load {checkpoint.folder} into. Nothing was loaded. Prepare the model, "
            "the optimizer and the loaders first."
        )
    plan = RestorePlan(
        parts,
        same_world=checkpoint.same_data(world_size, mesh or checkpoint.manifest.mesh),
    )
    plain = parts.plain_models()
    names = parameter_names(plain)
    elsewhere = names_elsewhere(plain, names)
    for index, model in enumerate(models):
        if model is not None:
            plan.models.append(
                plan_model(
                    model, checkpoint.component(numbered_name("model", index)), strict
                )
            )
    for index, optimizer in enumerate(parts.objects.optimizers):
        found = checkpoint.component(numbered_name("optimizer", index))
        inner = settle_state(getattr(optimizer, "optimizer", optimizer))
        plan.optimizers.append(plan_optimizer(inner, names, found, strict, elsewhere))
    for index, average in enumerate(parts.averages):
        average.refuse_if_swapped("load_state()")
        if (name := numbered_name("ema", index)) in checkpoint.manifest.components:
            plan.optimizers.append(
                plan_optimizer(
                    average, names, checkpoint.component(name), strict, elsewhere
                )
            )
        else:
            plan.restart(average, checkpoint)
    _plan_stateful(plan, checkpoint, rank, world_size, strict)
    if (
        "progress" not in checkpoint.manifest.components
        and checkpoint.manifest.notes.get("partial") is True
    ):
        log.warning(
            "%s was converted: counters, data positions and random states are reset",
            checkpoint.folder,
        )
        return plan
    # a new rank continues from one that existed
    plan.progress = load_packed(checkpoint, "progress", rank % saved_world)
    if plan.same_world:
        if "own_buffers" in checkpoint.manifest.components:
            plan.buffers = load_packed(checkpoint, "own_buffers", rank)
        plan.seed_generators = parts.randomness.restoring(
            load_packed(checkpoint, "random_states", rank), strict
        )
    else:
        step = checkpoint.manifest.step or 0
        plan.seed_generators = parts.randomness.deriving(
            load_packed(checkpoint, "random_states", 0), rank, step
        )
        words = (
            "the checkpoint was saved by %d processes and is loaded by %d: random states are derived anew from "
            "(seed, rank, step=%d), so dropout differs from an uninterrupted run; data order and tensors continue"
        )
        log.warning(words, saved_world, world_size, step)
    return plan


def _plan_stateful(
    plan: RestorePlan, checkpoint: Checkpoint, rank: int, world_size: int, strict: bool
) -> None:
    parts = plan.parts
    saved_world = checkpoint.manifest.world_size
    wanted: list[tuple[str, Stateful]] = []
    for index, scheduler in enumerate(parts.objects.schedulers):
        wanted.append(
            (
                numbered_name("scheduler", index),
                getattr(scheduler, "scheduler", scheduler),
            )
        )
    for index, loader in enumerate(parts.objects.loaders):
        wanted.append((numbered_name("loader", index), loader))
    for index, registered in enumerate(parts.registered):
        wanted.append((f"custom_checkpoint_{index}", registered))
    converted = checkpoint.manifest.notes.get("partial") is True
    known = checkpoint.manifest.components
    for name, thing in wanted:
        if converted and name not in known:
            continue
        if (
            saved_world != world_size
            and name in known
            and known[name].per_rank
            and not name.startswith("loader")
        ):
            if strict:
                raise CheckpointError(
                    f"{checkpoint.folder}: the {type(thing).__name__} registered for checkpointing ({name}) had a different state "
                    f"on each of the {saved_world} processes, which cannot be split over {world_size}. Nothing was loaded. "
                    f"Resume on {saved_world} processes, make its state equal on every rank before saving, or load with "
                    f"strict=False: rank r then takes the state of rank r % {saved_world}."
                )
            log.warning(
                "%s: rank r takes the state that rank r %% %d had saved",
                name,
                saved_world,
            )
        state = load_packed(checkpoint, name, rank % saved_world)
        if not isinstance(state, Mapping) and not name.startswith("custom_checkpoint"):
            raise CorruptCheckpointError(
                f"{checkpoint.folder}: {name} holds a {type(state).__name__} instead of a state dict. Nothing was "
                "loaded; use another checkpoint."
            )
        if isinstance(thing, Loader):
            thing.checked(state)
        plan.stateful.append((thing, state))
    scaler = parts.precision.scaler
    if (
        scaler is not None
        and scaler.is_enabled()
        and not (converted and "scaler" not in known)
    ):
        plan.stateful.append((parts.precision, load_packed(checkpoint, "scaler", None)))
