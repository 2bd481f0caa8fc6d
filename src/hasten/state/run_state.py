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
            process_states = self._process.read()
        except DataError:  # raised when they are captured
            return None
        on_device = None
        if self._device.type != "cpu":
            on_device = device_state(self._device)
        return Generators(torch.initial_seed(), process_states, on_device)

    # Any: tensors and numbers
    def capture(self, generators: Generators | None = None) -> dict[str, Any]:
        """Return the states of all generators, now or as they were read, and the seed of the run."""
        if generators is None:
            seed = torch.initial_seed()
            rng_state = RngState.capture(self._device)
        else:
            seed = generators.seed
            rng_state = RngState.capture(
                self._device, generators.process, generators.device
            )
        return {"seed": seed, "generators": dict(rng_state.tree)}

    def restoring(self, saved_states: Any, strict: bool = True) -> Callable[[], None]:
        """Return a function that restores a saved state.

        Raises: CorruptCheckpointError for the state of something else; DeviceError for that of another device, if strict.
        """
        rng_state = RngState.from_tree(_check_random_states(saved_states)["generators"])
        if strict:
            rng_state.check_device(self._device)
        return partial(rng_state.restore, self._device, "error" if strict else "warn")

    def deriving(self, saved_states: Any, rank: int, step: int) -> Callable[[], object]:
        """Return a function that seeds the generators by (seed of the run, rank, step), for another world size."""
        digest = hashlib.sha256(
            f"{_check_random_states(saved_states)['seed']}/{rank}/{step}".encode()
        ).digest()
        return partial(set_seed, int.from_bytes(digest[:7], "little"))


def _check_random_states(saved_states: Any) -> Mapping[str, Any]:
    if (
        not isinstance(saved_states, Mapping)
        or not isinstance(saved_states.get("generators"), Mapping)
        or "seed" not in saved_states
    ):
        raise CorruptCheckpointError(
            "the file of random states holds something else. Nothing was loaded."
        )
    return saved_states


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

    def saved_position(self) -> LoopPosition:
        """Return the position that a save stores: inside an accumulation window, that of its beginning.

        Raises: StepError if a window is open whose beginning is not known.
        """
        clock = self.clock
        if not clock.is_open or clock.read_position is None:
            return self.read_position(at_window=False)
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

    def read_position(self, *, at_window: bool) -> LoopPosition:
        """Return the current position; `at_window` also keeps what is changed in place, for a save inside the window that begins here. Local."""
        # in this process, or before a resume
        has_trained = self.clock.num_passes > 0
        for optimizer in self.objects.optimizers:
            has_trained = has_trained or getattr(optimizer, "num_attempts", 0) > 0
        loader_states = []
        for loader in self.objects.loaders:
            loader_states.append(loader.saved_state(has_trained))
        registered_states = {}
        buffer_copies: Mapping[str, Tensor] = {}
        # else they are captured after save hooks, which may draw
        generators = None
        if at_window:
            generators = self.randomness.read()
            for index, registered_object in enumerate(self.registered):
                if getattr(registered_object, "follows_data", False):
                    registered_states[index] = registered_object.state_dict()
            buffer_copies = self.buffers.copy_changing(self.plain_models())
        epochs_state: Mapping[str, Any] = {"loops": [], "ended": []}
        if self.epochs is not None and self.epochs.loops:
            epochs_state = self.epochs.state_dict()
        return LoopPosition(
            loader_states,
            generators,
            self.clock.state_dict(),
            epochs_state,
            None if self.trackers is None else self.trackers.step,
            registered_states,
            buffer_copies,
        )


def numbered_name(stem: str, index: int) -> str:
    """Return `model`, `model_1`, `model_2`: the first name has no number."""
    return stem if index == 0 else f"{stem}_{index}"


def num_updates(run_objects: RunObjects) -> int:
    """Return the number of optimizer updates of the run so far."""
    max_updates = 0
    for optimizer in run_objects.objects.optimizers:
        max_updates = max(max_updates, int(getattr(optimizer, "num_updates", 0)))
    return max_updates


def collect_state(
    run_objects: RunObjects,
    file_format: Format,
    weights: Sequence[Mapping[str, Any] | None],
    loop_position: LoopPosition,
) -> StateTree:
    """Return the run's state; `weights` per model are the state dicts edited by save hooks (None: not edited).

    Local: each rank independently.
    """
    models = run_objects.plain_models()
    names_by_id = parameter_names(models)
    prepared_objects = run_objects.objects
    components: dict[str, Component] = {}
    for index, (model, model_weights) in enumerate(zip(models, weights, strict=True)):
        if model_weights is None or len(model_weights):
            component_name = numbered_name("model", index)
            component = model_component(model, file_format, model_weights)
            if loop_position.buffers:
                component = _with_buffers(
                    component, loop_position.buffers, f"{component_name}/"
                )
            components[component_name] = component
    for index, optimizer in enumerate(prepared_objects.optimizers):
        inner_optimizer = getattr(optimizer, "optimizer", optimizer)
        components[numbered_name("optimizer", index)] = optimizer_component(
            inner_optimizer, names_by_id
        )
    for index, average in enumerate(run_objects.averages):
        average.refuse_if_swapped("save_state()")
        components[numbered_name("ema", index)] = optimizer_component(
            average, names_by_id
        )
    for index, scheduler in enumerate(prepared_objects.schedulers):
        scheduler_state = getattr(scheduler, "scheduler", scheduler).state_dict()
        components[numbered_name("scheduler", index)] = pack_component(
            scheduler_state, "scheduler", file_format="torch"
        )
    if run_objects.precision.scaler is not None and (
        scaler_state := run_objects.precision.state_dict()
    ):
        components["scaler"] = pack_component(
            scaler_state, "scaler", file_format="torch"
        )
    for index, loader_state in enumerate(loop_position.loaders):
        components[numbered_name("loader", index)] = pack_component(
            loader_state, "loader", per_rank=True
        )
    for index, registered_object in enumerate(run_objects.registered):
        scheduler_state = (
            loop_position.registered.get(index) or registered_object.state_dict()
        )
        components[f"custom_checkpoint_{index}"] = pack_component(
            scheduler_state, "object", object_name=type(registered_object).__name__
        )
    random_states = run_objects.randomness.capture(loop_position.generators)
    components["random_states"] = pack_component(random_states, "random", per_rank=True)
    components["progress"] = pack_component(
        _collect_progress(run_objects, loop_position), "progress", per_rank=True
    )
    return StateTree(components)


def _with_buffers(
    component: Component, buffer_values: Mapping[str, Tensor], prefix: str
) -> Component:
    """Return the component of a model with these values of its buffers."""
    tensors = dict(component.tensors)
    for buffer_name in component.main_only:
        tensors[buffer_name] = buffer_values.get(
            prefix + buffer_name, tensors[buffer_name]
        )
    return replace(component, tensors=tensors)


def _collect_progress(
    run_objects: RunObjects, loop_position: LoopPosition
) -> dict[str, Any]:
    """Return the counters of the run."""
    optimizer_counts = []
    for optimizer in run_objects.objects.optimizers:
        optimizer_counts.append(
            {
                "num_attempts": int(getattr(optimizer, "num_attempts", 0)),
                "num_updates": int(getattr(optimizer, "num_updates", 0)),
            }
        )
    num_seen = []
    schedule_lengths = []
    for scheduler in run_objects.objects.schedulers:
        num_seen.append(int(getattr(scheduler, "_seen", 0)))
        schedule_lengths.append(getattr(scheduler, "length", None))
    trackers_state = None
    if run_objects.trackers is not None:
        trackers_state = run_objects.trackers.state_dict()
        if "step" in trackers_state:
            trackers_state["step"] = loop_position.tracked_step
    return {
        "clock": loop_position.clock,
        "trackers": trackers_state,
        "optimizers": optimizer_counts,
        "schedulers": num_seen,
        "schedule_lengths": schedule_lengths,
        "epochs": loop_position.epochs,
    }


def named_buffers(
    models: Sequence[nn.Module],
    buffer_values: Mapping[str, Tensor] = MappingProxyType({}),
) -> Iterator[tuple[str, Tensor]]:
    """Yield every whole buffer of every model under one name, with its value in `values` instead of the current one."""
    for index, model in enumerate(models):
        for buffer_name, buffer in model.named_buffers():
            if not is_dtensor(buffer) and buffer.device.type != "meta":
                numbered_buffer = (
                    f"{numbered_name('model', index)}/{plain_name(buffer_name)}"
                )
                yield (
                    numbered_buffer,
                    buffer_values.get(numbered_buffer, buffer.detach()),
                )


def pack_component(
    nested_state: Any,
    kind: str,
    file_format: Format = "safetensors",
    per_rank: bool = False,
    object_name: str = "",
) -> Component:
    """Return a component of nested state."""
    packed_state, tensors = pack(nested_state, object_name)
    return Component(tensors, packed_state, kind, file_format, per_rank)


# Any: the stored value
def load_packed(checkpoint: Checkpoint, component_name: str, rank: int | None) -> Any:
    """Return a component that is not tensors alone, unpacked; its tensors are copies, independent of the files."""
    stored_component = checkpoint.component(component_name, rank)
    tensors = {}
    for tensor_name, pieces in stored_component.pieces.items():
        tensors[tensor_name] = join_pieces(pieces, tensor_name).clone()
    for alias, tensor_name in stored_component.aliases.items():
        tensors[alias] = tensors[tensor_name]
    if stored_component.data is None:
        return tensors
    return unpack(stored_component.data, tensors)


# Any: state dicts hold extra state
SaveHook = Callable[[list[nn.Module], list[dict[str, Any]], str], None]
LoadHook = Callable[[list[nn.Module], str], None]


def run_save_hooks(
    hooks: Mapping[int, SaveHook],
    run_objects: RunObjects,
    folder: str,
    agreement: Agreement,
) -> list[Mapping[str, Any] | None]:
    """Run the save hooks and return each model's edited weights; None where there is no hook. Ranks: every rank.

    Scripts write models in custom formats, and remove the weights, on the main process only: weights that are removed
    there are removed on every rank, and no others.
    """
    models = run_objects.plain_models()
    state_dicts: list[dict[str, Any]] = []
    for model in models if hooks else ():
        state_dicts.append(model.state_dict())
    edited_weights = list(state_dicts)
    for hook in list(hooks.values()):
        _call_hook(hook, list(models), edited_weights, folder)
    saved_weights: list[Mapping[str, Any] | None] = [None] * len(models)
    is_saved = [True] * len(models)
    if len(edited_weights) == len(state_dicts):
        saved_weights = list(edited_weights) or saved_weights
    else:
        remaining_ids = {id(model_weights) for model_weights in edited_weights}
        saved_weights = list(state_dicts)
        is_saved = [id(model_weights) in remaining_ids for model_weights in state_dicts]
    on_main: list[bool] = agreement.share(is_saved)[0]
    # ranks hold different models: refused by name when the state is compared
    if len(on_main) != len(saved_weights):
        return saved_weights
    for index, is_saved_on_main in enumerate(on_main):
        saved_weights[index] = saved_weights[index] if is_saved_on_main else {}
    return saved_weights


def run_load_hooks(
    hooks: Mapping[int, LoadHook], run_objects: RunObjects, folder: str
) -> list[nn.Module | None]:
    """Run the load hooks and return the models that remain to be loaded, None in place of the others."""
    models_to_load: list[nn.Module | None] = [*run_objects.plain_models()]
    hook_models = list(models_to_load)
    for hook in list(hooks.values()):
        _call_hook(hook, hook_models, folder)
    remaining_ids = set(map(id, hook_models))
    for index, model in enumerate(models_to_load):
        models_to_load[index] = model if id(model) in remaining_ids else None
    return models_to_load


# Any: arguments of hooks of either kind
def _call_hook(hook: Callable[..., None], *hook_arguments: Any) -> None:
    try:
        hook(*hook_arguments)
    except Exception as error:  # of any type: other ranks must learn of it
        hook_name = getattr(hook, "__qualname__", type(hook).__qualname__)
        raise HookError(
            f"the hook {hook_name} raised {type(error).__name__}: {error}"
        ) from error
