"""The state of a run as a StateTree: every part as a component."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor, nn

from hasten.checkpoint.base import Component, Format, StateTree
from hasten.checkpoint.format.packing import pack, unpack
from hasten.checkpoint.model_state import model_component
from hasten.checkpoint.optimizer_state import optimizer_component, parameter_names
from hasten.checkpoint.rank_agreement import Agreement
from hasten.checkpoint.reader import Checkpoint
from hasten.checkpoint.reshard import whole
from hasten.modules.dtensors import is_dtensor
from hasten.modules.names import plain_name
from hasten.optim.clock import StepClock
from hasten.precision.base import Precision
from hasten.state.epochs import EpochLoops
from hasten.state.randomness import Randomness
from hasten.state.undo import Stateful
from hasten.state.window_state import gradients_component, unowned_component
from hasten.strategies.alone import Alone
from hasten.strategies.base import KeepsLoopState, LoopState


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
    loops: KeepsLoopState = field(default_factory=Alone)
    epochs: EpochLoops | None = None
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


def settle_loops(parts: RunParts, together: Agreement) -> None:
    """Let wrapped models finish what the next forward would do first, together. Ranks: every rank."""
    waiting = [parts.loops.unsettled(model) for model in parts.objects.models]
    ready: list[list[bool]] = together.share([action is not None for action in waiting])
    for index, action in enumerate(waiting):
        if action is not None and all(rank[index : index + 1] == [True] for rank in ready):
            action()


def collect(parts: RunParts, fmt: Format, weights: Sequence[Mapping[str, Any] | None]) -> StateTree:
    """The run's state; `weights` per model are what save hooks left of the state dicts (None: untouched).

    Local: every rank for itself.
    """
    models = parts.plain_models()
    names = parameter_names(models)
    found: dict[str, Component] = {}
    for index, (model, weight) in enumerate(zip(models, weights, strict=True)):
        if weight is None or len(weight):
            found[numbered_name("model", index)] = model_component(model, fmt, weight)
    for index, optimizer in enumerate(parts.objects.optimizers):
        found[numbered_name("optimizer", index)] = optimizer_component(optimizer, names)
    for index, scheduler in enumerate(parts.objects.schedulers):
        found[numbered_name("scheduler", index)] = packed(scheduler.state_dict(), "scheduler", fmt="torch")
    if scaler := parts.precision.state_dict():
        found["scaler"] = packed(scaler, "scaler", fmt="torch")
    for index, loader in enumerate(parts.objects.loaders):
        found[numbered_name("loader", index)] = packed(loader.state_dict(), "loader", per_rank=True)
    for index, thing in enumerate(parts.registered):
        found[f"custom_checkpoint_{index}"] = packed(thing.state_dict(), "object", where=type(thing).__name__)
    found["random_states"] = packed(parts.randomness.capture(), "random", per_rank=True)
    open_window = bool(parts.clock.in_flight)
    loops = [parts.loops.loop_state(model, names, open_window) for model in parts.objects.models]
    found["progress"] = packed(_progress(parts, [_without_groups(loop) for loop in loops]), "progress", per_rank=True)
    if open_window:
        held = {key: tensor for loop in loops for key, tensor in loop.tensors.items()}
        groups = {key: members for loop in loops for key, members in loop.notes.get("groups", {}).items()}
        found["gradients"] = gradients_component(models, names, held, groups)
    if parts.clock.unowned is not None and (kept := parts.clock.unowned.saved()):
        found["unowned_gradients"] = unowned_component(kept, names)
    return StateTree(found)


def named_buffers(models: Sequence[nn.Module]) -> Iterator[tuple[str, Tensor]]:
    """Every whole buffer of every model under one name."""
    for index, model in enumerate(models):
        for name, buffer in model.named_buffers():
            if not is_dtensor(buffer) and buffer.device.type != "meta":
                yield f"{numbered_name('model', index)}/{plain_name(name)}", buffer.detach()


def packed(value: Any, kind: str, fmt: Format = "safetensors", per_rank: bool = False, where: str = "") -> Component:
    """A component of nested state."""
    data, tensors = pack(value, where)
    return Component(tensors, data, kind, fmt, per_rank)


def _without_groups(loop: LoopState) -> dict[str, Any]:
    return {key: value for key, value in loop.notes.items() if key != "groups"}


def _progress(parts: RunParts, loops: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "clock": parts.clock.state_dict(),
        "trackers": None if parts.trackers is None else parts.trackers.state_dict(),
        "optimizers": [
            {key: int(getattr(optimizer, key, 0)) for key in ("num_attempts", "num_updates")}
            for optimizer in parts.objects.optimizers
        ],
        "schedulers": [int(getattr(scheduler, "_seen", 0)) for scheduler in parts.objects.schedulers],
        "loops": loops,
        "epochs": None if parts.epochs is None else parts.epochs.state_dict(),
    }


def load_packed(checkpoint: Checkpoint, name: str, rank: int | None) -> Any:  # Any: the stored value
    """A component that is not tensors alone, as it was given; its tensors are copies, free of the files."""
    found = checkpoint.component(name, rank)
    tensors = {key: whole(pieces, key).clone() for key, pieces in found.pieces.items()}
    tensors |= {alias: tensors[key] for alias, key in found.aliases.items()}
    if found.data is None:
        return tensors
    return unpack(found.data, tensors)
