"""State of a run as a StateTree, with one component per object."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from types import MappingProxyType
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from hasten.checkpoint.base import Component, Format, StateTree
from hasten.checkpoint.format.packing import pack, unpack
from hasten.checkpoint.reader import Checkpoint
from hasten.checkpoint.reshard import join_pieces
from hasten.checkpoint.state_dicts import (
    model_component,
    optimizer_component,
    parameter_names,
)
from hasten.comm.agreement import Agreement
from hasten.data.random_states import RandomStates
from hasten.errors import CorruptCheckpointError, DataError, HookError, StepError
from hasten.modules.names import is_dtensor, plain_name
from hasten.optim.clock import StepClock
from hasten.optim.ema import AverageState
from hasten.optim.gradients import drop_gradients
from hasten.precision.base import Precision
from hasten.prepare_args import PreparedObjects
from hasten.runtime.seeding import RngState, device_state, set_seed
from hasten.state.epochs import EpochLoops
from hasten.state.loop_position import BufferCopies, Generators, LoopPosition
from hasten.tracking.manager import TrackerManager

log = logging.getLogger(__name__)


class Stateful(Protocol):
    """Object with state: registered objects, loaders, schedulers, trackers."""

    def state_dict(self) -> Any: ...  # Any: plain values and tensors

    def load_state_dict(self, state: Any) -> Any: ...


class Randomness:
    """Capture and restoration of the generators of Python, numpy, torch and the device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._process = RandomStates()

    def read(self) -> Generators | None:
        """Return the states of all generators, in the form that takes least time; None if one of them cannot be saved."""
        try:
            process = self._process.read()
        except DataError:  # raised when they are captured
            return None
        return Generators(torch.initial_seed(), process, device_state(self._device))

    # Any: tensors and numbers
    def capture(self, generators: Generators | None = None) -> dict[str, Any]:
        """Return the states of all generators, now or as they were read, and the seed of the run."""
        if generators is None:
            return {
                "seed": torch.initial_seed(),
                "generators": RngState.capture(self._device).to_tree(),
            }
        process = generators.process
        state = RngState.of(
            process.python,
            process.numpy,
            process.torch,
            self._device,
            generators.device,
        )
        return {"seed": generators.seed, "generators": state.to_tree()}

    def restoring(self, saved: Any, strict: bool = True) -> Callable[[], None]:
        """Return a function that restores a saved state.

        Raises: CorruptCheckpointError for the state of something else; DeviceError for that of another device, if strict.
        """
        state = RngState.from_tree(_checked(saved)["generators"])
        if strict:
            state.check_device(self._device)
        return partial(state.restore, self._device, "error" if strict else "warn")

    def deriving(self, saved: Any, rank: int, step: int) -> Callable[[], object]:
        """Return a function that seeds the generators by (seed of the run, rank, step), for another world size."""
        digest = hashlib.sha256(
            f"{_checked(saved)['seed']}/{rank}/{step}".encode()
        ).digest()
        return partial(set_seed, int.from_bytes(digest[:7], "little"))


def _checked(saved: Any) -> Mapping[str, Any]:
    if (
        not isinstance(saved, Mapping)
        or not isinstance(saved.get("generators"), Mapping)
        or "seed" not in saved
    ):
        raise CorruptCheckpointError(
            "the file of random states holds something else. Nothing was loaded."
        )
    return saved


@dataclass(slots=True)
class RunObjects:
    """All objects that a checkpoint is made from. The lists grow during the run."""

    objects: PreparedObjects
    unwrap: Callable[[nn.Module], nn.Module]
    clock: StepClock
    precision: Precision
    randomness: Randomness
    trackers: TrackerManager | None = None
    drop_gradients: Callable[[nn.Module], None] = drop_gradients
    """Drops all gradients of a prepared model, also those that its wrapper holds."""
    epochs: EpochLoops | None = None
    # Any: objects with state_dict and load_state_dict
    registered: list[Any] = field(default_factory=list)
    averages: list[AverageState] = field(default_factory=list)
    """Moving averages of weights, saved by parameter name as optimizer state is."""
    buffers: BufferCopies = field(default_factory=BufferCopies)

    def plain_models(self) -> list[nn.Module]:
        """Return the user's modules, without wrappers."""
        return list(map(self.unwrap, self.objects.models))

    @property
    def has_trained(self) -> bool:
        """True if the run has trained, in this process or before a resume."""
        return self.clock.num_passes > 0 or any(
            getattr(optimizer, "num_attempts", 0)
            for optimizer in self.objects.optimizers
        )

    def saved_position(self) -> LoopPosition:
        """Return the position that a save stores: inside an accumulation window, that of its beginning.

        Raises: StepError if a window is open whose beginning is not known.
        """
        clock = self.clock
        if not clock.is_open or clock.read_position is None:
            # random generators are captured after save hooks, which may draw
            return replace(read_position(self, at_window=False), generators=None)
        position = clock.position
        if not isinstance(position, LoopPosition):
            raise StepError(
                "save_state() was called between backward() and optimizer.step(), where the gradients are not saved and the batch would be lost. "
                "Nothing was saved. Call save_state() after optimizer.step()."
            )
        if any(scheduler.steps_each_batch for scheduler in self.objects.schedulers):
            raise StepError(
                "save_state() was called inside an accumulation window with step_scheduler_with_optimizer=False, whose schedules have moved "
                "since the window began. Nothing was saved. Save where accelerator.sync_gradients is True, after optimizer.step()."
            )
        self.buffers.refuse_late_changes(position.buffers)
        return position


def numbered_name(stem: str, index: int) -> str:
    """Return `model`, `model_1`, `model_2`: the first name has no number."""
    return stem if index == 0 else f"{stem}_{index}"


def num_updates(parts: RunObjects) -> int:
    """Return the number of optimizer updates of the run so far."""
    most = 0
    for optimizer in parts.objects.optimizers:
        most = max(most, int(getattr(optimizer, "num_updates", 0)))
    return most


def read_position(parts: RunObjects, *, at_window: bool) -> LoopPosition:
    """Return the current position; `at_window` also keeps what is changed in place, for a save inside the window that begins here. Local."""
    loaders = []
    has_trained = parts.has_trained
    for loader in parts.objects.loaders:
        loaders.append(loader.saved_state(has_trained))
    registered = {}
    for index, thing in enumerate(parts.registered):
        if at_window and getattr(thing, "follows_data", False):
            registered[index] = thing.state_dict()
    return LoopPosition(
        loaders,
        parts.randomness.read(),
        parts.clock.state_dict(),
        None if parts.epochs is None else parts.epochs.state_dict(),
        None if parts.trackers is None else parts.trackers.step,
        registered,
        parts.buffers.copy_changing(parts.plain_models()) if at_window else {},
    )


def collect(
    parts: RunObjects,
    fmt: Format,
    weights: Sequence[Mapping[str, Any] | None],
    position: LoopPosition,
) -> StateTree:
    """Return the run's state; `weights` per model are the state dicts edited by save hooks (None: not edited).

    Local: each rank independently.
    """
    models = parts.plain_models()
    names = parameter_names(models)
    objects = parts.objects
    components: dict[str, Component] = {}
    for index, (model, weight) in enumerate(zip(models, weights, strict=True)):
        if weight is None or len(weight):
            name = numbered_name("model", index)
            components[name] = _with_buffers(
                model_component(model, fmt, weight), position.buffers, f"{name}/"
            )
    for index, optimizer in enumerate(objects.optimizers):
        inner = getattr(optimizer, "optimizer", optimizer)
        components[numbered_name("optimizer", index)] = optimizer_component(
            inner, names
        )
    for index, average in enumerate(parts.averages):
        average.refuse_if_swapped("save_state()")
        components[numbered_name("ema", index)] = optimizer_component(average, names)
    for index, scheduler in enumerate(objects.schedulers):
        state = getattr(scheduler, "scheduler", scheduler).state_dict()
        components[numbered_name("scheduler", index)] = packed(
            state, "scheduler", fmt="torch"
        )
    if parts.precision.scaler is not None and (scaler := parts.precision.state_dict()):
        components["scaler"] = packed(scaler, "scaler", fmt="torch")
    for index, loader_state in enumerate(position.loaders):
        components[numbered_name("loader", index)] = packed(
            loader_state, "loader", per_rank=True
        )
    for index, thing in enumerate(parts.registered):
        state = position.registered.get(index) or thing.state_dict()
        components[f"custom_checkpoint_{index}"] = packed(
            state, "object", where=type(thing).__name__
        )
    random_states = parts.randomness.capture(position.generators)
    components["random_states"] = packed(random_states, "random", per_rank=True)
    components["progress"] = packed(
        _progress(parts, position), "progress", per_rank=True
    )
    return StateTree(components)


def _with_buffers(
    component: Component, buffers: Mapping[str, Tensor], prefix: str
) -> Component:
    """Return the component of a model with these values of its buffers."""
    tensors = dict(component.tensors)
    for name in component.main_only:
        tensors[name] = buffers.get(prefix + name, tensors[name])
    return replace(component, tensors=tensors)


def _progress(parts: RunObjects, position: LoopPosition) -> dict[str, Any]:
    """Return the counters of the run."""
    counts = []
    for optimizer in parts.objects.optimizers:
        attempts, updates = (
            getattr(optimizer, "num_attempts", 0),
            getattr(optimizer, "num_updates", 0),
        )
        counts.append({"num_attempts": int(attempts), "num_updates": int(updates)})
    seen, schedule_lengths = [], []
    for scheduler in parts.objects.schedulers:
        seen.append(int(getattr(scheduler, "_seen", 0)))
        schedule_lengths.append(getattr(scheduler, "length", None))
    trackers = None
    if parts.trackers is not None:
        trackers = parts.trackers.state_dict()
        if "step" in trackers:
            trackers["step"] = position.tracked_step
    return {
        "clock": position.clock,
        "trackers": trackers,
        "optimizers": counts,
        "schedulers": seen,
        "schedule_lengths": schedule_lengths,
        "epochs": position.epochs,
    }


def named_buffers(
    models: Sequence[nn.Module], values: Mapping[str, Tensor] = MappingProxyType({})
) -> Iterator[tuple[str, Tensor]]:
    """Yield every whole buffer of every model under one name, with its value in `values` instead of the current one."""
    for index, model in enumerate(models):
        for plain, buffer in model.named_buffers():
            if not is_dtensor(buffer) and buffer.device.type != "meta":
                name = f"{numbered_name('model', index)}/{plain_name(plain)}"
                yield name, values.get(name, buffer.detach())


def packed(
    value: Any,
    kind: str,
    fmt: Format = "safetensors",
    per_rank: bool = False,
    where: str = "",
) -> Component:
    """Return a component of nested state."""
    data, tensors = pack(value, where)
    return Component(tensors, data, kind, fmt, per_rank)


# Any: the stored value
def load_packed(checkpoint: Checkpoint, name: str, rank: int | None) -> Any:
    """Return a component that is not tensors alone, unpacked; its tensors are copies, independent of the files."""
    found = checkpoint.component(name, rank)
    tensors = {}
    for key, pieces in found.pieces.items():
        tensors[key] = join_pieces(pieces, key).clone()
    for alias, key in found.aliases.items():
        tensors[alias] = tensors[key]
    if found.data is None:
        return tensors
    return unpack(found.data, tensors)


# Any: state dicts hold extra state
SaveHook = Callable[[list[nn.Module], list[dict[str, Any]], str], None]
LoadHook = Callable[[list[nn.Module], str], None]


def run_save_hooks(
    hooks: Mapping[int, SaveHook], parts: RunObjects, folder: str, together: Agreement
) -> list[Mapping[str, Any] | None]:
    """Run the save hooks and return each model's edited weights; None where there is no hook. Ranks: every rank.

    Scripts write models in custom formats, and remove the weights, on the main process only: weights that are removed
    there are removed on every rank, and no others.
    """
    models = parts.plain_models()
    given: list[dict[str, Any]] = []
    for model in models if hooks else ():
        given.append(model.state_dict())
    weights = list(given)
    for hook in list(hooks.values()):
        _call(hook, list(models), weights, folder)
    own: list[Mapping[str, Any] | None] = [None] * len(models)
    kept = [True] * len(models)
    if len(weights) == len(given):
        own = list(weights) or own
    else:
        left = {id(weight) for weight in weights}
        own, kept = list(given), [id(weight) in left for weight in given]
    on_main: list[bool] = together.share(kept)[0]
    # ranks hold different models: refused by name when the state is compared
    if len(on_main) != len(own):
        return own
    for index, stays in enumerate(on_main):
        own[index] = own[index] if stays else {}
    return own


def run_load_hooks(
    hooks: Mapping[int, LoadHook], parts: RunObjects, folder: str
) -> list[nn.Module | None]:
    """Run the load hooks and return the models that remain to be loaded, None in place of the others."""
    given: list[nn.Module | None] = [*parts.plain_models()]
    models = list(given)
    for hook in list(hooks.values()):
        _call(hook, models, folder)
    left = set(map(id, models))
    for index, model in enumerate(given):
        given[index] = model if id(model) in left else None
    return given


# Any: arguments of hooks of either kind
def _call(hook: Callable[..., None], *given: Any) -> None:
    try:
        hook(*given)
    except Exception as error:  # of any type: other ranks must learn of it
        name = getattr(hook, "__qualname__", type(hook).__qualname__)
        raise HookError(
            f"the hook {name} raised {type(error).__name__}: {error}"
        ) from error
