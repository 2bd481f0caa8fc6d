"""The state of a run as a StateTree, and the way back: everything is checked before anything changes."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor, nn

from hasten.accelerator.randomness import Randomness
from hasten.accelerator.window_state import bucket_order, gradients, movable, put_gradients, replay_order
from hasten.checkpoint.base import Component, Format, StateTree
from hasten.checkpoint.filling import run_copies
from hasten.checkpoint.model_state import LoadReport, ModelPlan, model_component, plan_model
from hasten.checkpoint.optimizer_state import (
    OptimizerPlan,
    optimizer_component,
    parameter_names,
    plan_optimizer,
)
from hasten.checkpoint.packing import pack, unpack
from hasten.checkpoint.reader import Checkpoint
from hasten.checkpoint.reshard import whole
from hasten.checkpoint.transfer import as_bytes
from hasten.comm.base import Comm
from hasten.errors import CheckpointError, CorruptCheckpointError
from hasten.modules.dtensors import is_dtensor
from hasten.modules.names import plain_name
from hasten.optim.clock import StepClock
from hasten.precision.base import Precision
from hasten.runtime.logs import get_logger

log = get_logger(__name__)


class Stateful(Protocol):
    """Anything with state: registered objects, loaders, schedulers, trackers."""

    def state_dict(self) -> Any: ...  # Any: plain values and tensors

    def load_state_dict(self, state: Any) -> Any: ...


class Objects(Protocol):
    """What an Accelerator has prepared."""

    @property
    def models(self) -> Sequence[nn.Module]: ...
    @property
    def optimizers(self) -> Sequence[Any]: ...
    @property
    def schedulers(self) -> Sequence[Any]: ...
    @property
    def loaders(self) -> Sequence[Any]: ...


@dataclass(slots=True)
class RunParts:
    """Everything a checkpoint is made from. The lists grow as the run goes on."""

    objects: Objects
    unwrap: Callable[[nn.Module], nn.Module]
    clock: StepClock
    precision: Precision
    randomness: Randomness
    trackers: Stateful | None = None
    registered: list[Any] = field(default_factory=list)  # Any: objects with state_dict and load_state_dict

    def plain_models(self) -> list[nn.Module]:
        """The user's own modules."""
        return [self.unwrap(model) for model in self.objects.models]


def numbered_name(stem: str, index: int) -> str:
    """`model`, `model_1`, `model_2`: the familiar way to count."""
    return stem if index == 0 else f"{stem}_{index}"


def num_updates(parts: RunParts) -> int:
    """Optimizer updates of the run so far."""
    return max((int(getattr(optimizer, "num_updates", 0)) for optimizer in parts.objects.optimizers), default=0)


def collect(parts: RunParts, fmt: Format, weights: Sequence[Mapping[str, Any] | None]) -> StateTree:
    """The run's state; `weights` per model are what save hooks left of the state dicts (None: untouched)."""
    models = parts.plain_models()
    names = parameter_names(models)
    found: dict[str, Component] = {}
    for index, (model, weight) in enumerate(zip(models, weights, strict=True)):
        if weight is None or len(weight):
            found[numbered_name("model", index)] = model_component(model, fmt, weight)
    for index, optimizer in enumerate(parts.objects.optimizers):
        found[numbered_name("optimizer", index)] = optimizer_component(optimizer, names)
    for index, scheduler in enumerate(parts.objects.schedulers):
        found[numbered_name("scheduler", index)] = _packed(scheduler.state_dict(), "scheduler", fmt="torch")
    if scaler := parts.precision.state_dict():
        found["scaler"] = _packed(scaler, "scaler", fmt="torch")
    for index, loader in enumerate(parts.objects.loaders):
        found[numbered_name("loader", index)] = _packed(loader.state_dict(), "loader", per_rank=True)
    for index, thing in enumerate(parts.registered):
        found[f"custom_checkpoint_{index}"] = _packed(thing.state_dict(), "object", where=type(thing).__name__)
    found["random_states"] = _packed(parts.randomness.capture(), "random", per_rank=True)
    found["progress"] = _packed(_progress(parts), "progress", per_rank=True)
    if parts.clock.in_flight:
        found["gradients"] = Component(gradients(models, names), None, "gradients", per_rank=True)
    return StateTree(found)


def own_buffers(models: Sequence[nn.Module], comm: Comm) -> StateTree:
    """Buffers that differ from the main rank's (batch statistics between two synchronisations), where any does.

    Ranks: every rank.
    """
    if comm.size == 1:
        return StateTree()
    held = dict(named_buffers(models))
    sums = {key: zlib.crc32(bytes(as_bytes(t.cpu().contiguous()).numpy().data)) for key, t in held.items()}
    everyone: list[dict[str, int]] = comm.all_gather_object(sums)
    if all(other == everyone[0] for other in everyone):
        return StateTree()
    own = {key: tensor for key, tensor in held.items() if sums[key] != everyone[0].get(key)}
    return StateTree({"own_buffers": Component(own, None, "buffers", per_rank=True)})


def named_buffers(models: Sequence[nn.Module]) -> Iterator[tuple[str, Tensor]]:
    """Every whole buffer of every model under one name."""
    for index, model in enumerate(models):
        for name, buffer in model.named_buffers():
            if not is_dtensor(buffer) and buffer.device.type != "meta":
                yield f"{numbered_name('model', index)}/{plain_name(name)}", buffer.detach()


def _packed(value: Any, kind: str, fmt: Format = "safetensors", per_rank: bool = False, where: str = "") -> Component:
    data, tensors = pack(value, where)
    return Component(tensors, data, kind, fmt, per_rank)


def _progress(parts: RunParts) -> dict[str, Any]:
    return {
        "clock": parts.clock.state_dict(),
        "trackers": None if parts.trackers is None else parts.trackers.state_dict(),
        "optimizers": [
            {key: int(getattr(optimizer, key, 0)) for key in ("num_attempts", "num_updates")}
            for optimizer in parts.objects.optimizers
        ],
        "schedulers": [int(getattr(scheduler, "_seen", 0)) for scheduler in parts.objects.schedulers],
        # How DDP packs gradients decides the last bits of their sum over more than two ranks; and it brings buffers
        # into line at the next forward, or not, depending on how the last one went.
        "bucket_order": [bucket_order(model) for model in parts.objects.models],
        "buffer_sync": [getattr(model, "require_forward_param_sync", None) for model in parts.objects.models],
    }


@dataclass(slots=True)
class Restore:
    """All that loading will change, decided and checked, nothing changed yet."""

    parts: RunParts
    models: list[ModelPlan] = field(default_factory=list)
    optimizers: list[OptimizerPlan] = field(default_factory=list)
    stateful: list[tuple[Stateful, Any]] = field(default_factory=list)  # Any: their state
    progress: Mapping[str, Any] = field(default_factory=dict)
    gradients: dict[str, Tensor] | None = None
    buffers: dict[str, Tensor] = field(default_factory=dict)
    same_world: bool = True
    seed_generators: Callable[[], None] = lambda: None

    @property
    def reports(self) -> list[LoadReport]:
        """What did not match, per model."""
        return [plan.report for plan in self.models]

    def apply(self) -> None:
        """Change the run: what can fail in user code first, then tensors, then counters and random state.

        Ranks: every rank.
        """
        for model, order in zip(self.parts.objects.models, self.progress.get("bucket_order", []), strict=False):
            if order is not None and self.same_world:
                replay_order(model, order)
        for thing, state in self.stateful:
            thing.load_state_dict(state)
        plans: list[ModelPlan | OptimizerPlan] = [*self.models, *self.optimizers]
        run_copies([copy for plan in plans for copy in plan.copies])
        for plan in plans:
            plan.finish()
        if self.progress:
            self._counters()
        self.seed_generators()

    def _counters(self) -> None:
        parts, saved = self.parts, self.progress
        for name, buffer in named_buffers(parts.plain_models()):
            if name in self.buffers:
                buffer.copy_(self.buffers[name])
        for model, flag in zip(parts.objects.models, saved["buffer_sync"], strict=False):
            if flag is not None and hasattr(model, "require_forward_param_sync"):
                model.require_forward_param_sync = flag
        models = parts.plain_models()
        put_gradients(models, parameter_names(models), self.gradients or {})
        parts.clock.load_state_dict(saved["clock"], gradients=self.gradients is not None)
        for optimizer, counts in zip(parts.objects.optimizers, saved["optimizers"], strict=False):
            for key, value in counts.items():
                if hasattr(optimizer, key):
                    setattr(optimizer, key, value)
        for scheduler, seen in zip(parts.objects.schedulers, saved["schedulers"], strict=False):
            if hasattr(scheduler, "_seen"):
                scheduler._seen = seen
        if parts.trackers is not None and saved["trackers"] is not None:
            parts.trackers.load_state_dict(saved["trackers"])


def plan_restore(
    parts: RunParts,
    models: Sequence[nn.Module | None],
    checkpoint: Checkpoint,
    rank: int,
    world_size: int,
    strict: bool,
) -> Restore:
    """Check the whole checkpoint against the run. Ranks: every rank for itself; changes nothing.

    `models` are the user's own modules; None stands for one that a load hook takes care of.
    """
    saved_world = checkpoint.manifest.world_size
    source = rank % saved_world  # a rank that was not there before continues from one that was
    plan = Restore(parts, same_world=saved_world == world_size)
    names = parameter_names(parts.plain_models())
    for index, model in enumerate(models):
        if model is not None:
            plan.models.append(plan_model(model, checkpoint.component(numbered_name("model", index)), strict))
    for index, optimizer in enumerate(parts.objects.optimizers):
        found = checkpoint.component(numbered_name("optimizer", index))
        plan.optimizers.append(plan_optimizer(optimizer, names, found, strict))
    _plan_stateful(plan, checkpoint, source)
    if "progress" not in checkpoint.manifest.components and checkpoint.manifest.notes.get("partial") is True:
        log.warning("%s was converted: counters, data positions and random states begin anew", checkpoint.folder)
        return plan
    plan.progress = checked_progress(load_packed(checkpoint, "progress", source))
    if "gradients" in checkpoint.manifest.components:
        plan.gradients = _find_gradients(checkpoint, rank, world_size)
        if saved_world != world_size:
            plan.progress = {**plan.progress, "clock": _mean_clock(checkpoint, world_size, plan.progress["clock"])}
    if saved_world == world_size:
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


def _plan_stateful(plan: Restore, checkpoint: Checkpoint, source: int) -> None:
    parts = plan.parts
    wanted: list[tuple[str, Stateful, int | None]] = []
    wanted += [(numbered_name("scheduler", i), s, None) for i, s in enumerate(parts.objects.schedulers)]
    wanted += [(numbered_name("loader", i), x, source) for i, x in enumerate(parts.objects.loaders)]
    wanted += [(f"custom_checkpoint_{i}", x, None) for i, x in enumerate(parts.registered)]
    partial = checkpoint.manifest.notes.get("partial") is True
    wanted = [item for item in wanted if not partial or item[0] in checkpoint.manifest.components]
    for name, thing, rank in wanted:
        plan.stateful.append((thing, load_packed(checkpoint, name, rank)))
    if parts.precision.state_dict() and not (partial and "scaler" not in checkpoint.manifest.components):
        plan.stateful.append((parts.precision, load_packed(checkpoint, "scaler", None)))
    for (name, _, _), (_, state) in zip(wanted, plan.stateful, strict=False):
        if not isinstance(state, Mapping) and not name.startswith("custom_checkpoint"):
            raise CorruptCheckpointError(
                f"{checkpoint.folder}: {name} holds a {type(state).__name__} instead of a state dict. Nothing was "
                "loaded; use another checkpoint."
            )


def checked_progress(saved: Any) -> dict[str, Any]:  # Any: whatever the file holds
    """The counters of a run, tried out on a clock that nobody uses.

    Raises: CorruptCheckpointError when they are not what `collect` wrote.
    """
    try:
        StepClock().load_state_dict(saved["clock"], gradients=True)
        counters = [{str(key): int(value) for key, value in counts.items()} for counts in saved["optimizers"]]
        seen = [int(value) for value in saved["schedulers"]]
        orders = [None if order is None else [int(n) for n in order] for order in saved["bucket_order"]]
        flags = [None if flag is None else bool(flag) for flag in saved["buffer_sync"]]
        return {
            "clock": saved["clock"],
            "trackers": saved["trackers"],
            "optimizers": counters,
            "schedulers": seen,
            "buffer_sync": flags,
            "bucket_order": orders,
        }
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CorruptCheckpointError(
            f"the counters of the run cannot be read ({type(error).__name__}: {error}). Nothing was loaded; use another "
            "checkpoint."
        ) from error


def load_packed(checkpoint: Checkpoint, name: str, rank: int | None) -> Any:  # Any: the stored value
    """A component that is not tensors alone, as it was given; its tensors are copies, free of the files."""
    found = checkpoint.component(name, rank)
    tensors = {key: whole(pieces, key).clone() for key, pieces in found.pieces.items()}
    tensors |= {alias: tensors[key] for alias, key in found.aliases.items()}
    if found.data is None:
        return tensors
    return unpack(found.data, tensors)


def _find_gradients(checkpoint: Checkpoint, rank: int, world_size: int) -> dict[str, Tensor]:
    saved_world = checkpoint.manifest.world_size
    if saved_world == world_size:
        found = checkpoint.component("gradients", rank)
        return {key: whole(pieces, key).clone() for key, pieces in found.pieces.items()}
    # Another number of processes: everybody takes the mean, whose mean over any number of ranks is the same.
    mean: dict[str, Tensor] = {}
    if not movable(checkpoint.component("gradients", 0).pieces):
        raise CheckpointError(
            f"the checkpoint was saved inside an accumulation window of {saved_world} processes that shard and "
            f"replicate, and its gradients cannot be shared out over {world_size}. Nothing was loaded. Resume on "
            f"{saved_world} processes, or save where a window ends (accelerator.sync_gradients)."
        )
    for other in range(saved_world):
        for key, pieces in checkpoint.component("gradients", other).pieces.items():
            part = whole(pieces, key) / saved_world
            mean[key] = mean[key] + part if key in mean else part
    weighted = any(window["weighted"] for window in load_packed(checkpoint, "progress", 0)["clock"]["windows"])
    return {key: value * (saved_world / world_size) for key, value in mean.items()} if weighted else mean


def _mean_clock(checkpoint: Checkpoint, world_size: int, clock: dict[str, Any]) -> dict[str, Any]:
    """The clock with the weight of every old rank shared out over the new ones."""
    saved_world = checkpoint.manifest.world_size
    others = [load_packed(checkpoint, "progress", other)["clock"]["windows"] for other in range(saved_world)]
    if len({len(windows) for windows in others}) != 1:
        raise CheckpointError(
            f"the {saved_world} ranks of the checkpoint stood in different accumulation windows, which cannot be shared "
            f"out over {world_size}. Nothing was loaded. Resume on {saved_world} processes."
        )
    windows = [
        {**window, "weight": sum(other[i]["weight"] for other in others) / world_size}
        for i, window in enumerate(clock["windows"])
    ]
    return {**clock, "windows": windows}
