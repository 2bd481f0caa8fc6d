"""State of a run as a StateTree, with one component per object."""

from __future__ import annotations

import hashlib
import logging
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from hasten.checkpoint.base import Component, Format, StateTree
from hasten.checkpoint.format.packing import pack, unpack
from hasten.checkpoint.model_state import model_component
from hasten.checkpoint.optimizer_state import optimizer_component, parameter_names
from hasten.checkpoint.reader import Checkpoint
from hasten.checkpoint.reshard import whole
from hasten.comm.agreement import Agreement
from hasten.errors import CorruptCheckpointError, HookError
from hasten.modules.names import is_dtensor, plain_name
from hasten.optim.clock import StepClock
from hasten.precision.base import Precision
from hasten.runtime.seeding import RngState, set_seed
from hasten.state.epochs import EpochLoops
from hasten.state.undo import Stateful
from hasten.state.window_state import gradients_component, unowned_component
from hasten.strategies.base import KeepsLoopState, LoopState
from hasten.strategies.native import Alone

log = logging.getLogger(__name__)


class Randomness:
    """Capture and restoration of the generators of Python, numpy, torch and the device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def capture(self) -> dict[str, Any]:  # Any: tensors and numbers
        """Return the state of all generators, and the seed of the run."""
        return {"seed": torch.initial_seed(), "generators": RngState.capture(self._device).to_tree()}

    def holding(self) -> Callable[[], None]:
        """Return a function that restores the current states of the generators."""
        state = RngState.capture(self._device)
        return lambda: state.restore(self._device)

    def restoring(self, saved: Any, strict: bool = True) -> Callable[[], None]:
        """Check a saved state and return a function that restores it.

        Raises: CorruptCheckpointError when it is invalid.
        """
        state = RngState.from_tree(_checked(saved)["generators"])
        _try_out(state)
        return lambda: state.restore(self._device, "error" if strict else "warn")

    def deriving(self, saved: Any, rank: int, step: int) -> Callable[[], None]:
        """Return a function that seeds the generators by (seed of the run, rank, step), for another world size."""
        digest = hashlib.sha256(f"{_checked(saved)['seed']}/{rank}/{step}".encode()).digest()
        seed = int.from_bytes(digest[:7], "little")

        def derive() -> None:
            set_seed(seed)

        return derive


def _checked(saved: Any) -> Mapping[str, Any]:
    if not isinstance(saved, Mapping) or not isinstance(saved.get("generators"), Mapping) or "seed" not in saved:
        raise CorruptCheckpointError("the file of random states holds something else. Nothing was loaded.")
    return saved


def _try_out(state: RngState) -> None:
    """Set unused generators, so that an invalid state is found before any real one changes."""
    try:
        words = tuple(state.python["words"].tolist())
        random.Random().setstate((state.python["version"], words, state.python["gauss"]))
        n = state.numpy
        position, has_gauss, gauss = n["position"], n["has_gauss"], n["gauss"]
        np.random.RandomState().set_state((n["kind"], n["words"].numpy().astype(np.uint32), position, has_gauss, gauss))
        torch.Generator().set_state(state.cpu)
    except (ValueError, TypeError, OverflowError, RuntimeError) as error:
        raise CorruptCheckpointError(
            f"the saved random state is impossible ({error}). Nothing was loaded; use another checkpoint."
        ) from error


class RunObjects(Protocol):
    """The objects that an Accelerator has prepared."""

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
    """All objects that a checkpoint is made from. The lists grow during the run."""

    objects: RunObjects
    unwrap: Callable[[nn.Module], nn.Module]
    clock: StepClock
    precision: Precision
    randomness: Randomness
    trackers: Stateful | None = None
    loops: KeepsLoopState = field(default_factory=Alone)
    epochs: EpochLoops | None = None
    registered: list[Any] = field(default_factory=list)  # Any: objects with state_dict and load_state_dict

    def plain_models(self) -> list[nn.Module]:
        """Return the user's modules, without wrappers."""
        return [self.unwrap(model) for model in self.objects.models]


def numbered_name(stem: str, index: int) -> str:
    """Return `model`, `model_1`, `model_2`: the first name has no number."""
    return stem if index == 0 else f"{stem}_{index}"


def num_updates(parts: RunParts) -> int:
    """Return the number of optimizer updates of the run so far."""
    return max((int(getattr(optimizer, "num_updates", 0)) for optimizer in parts.objects.optimizers), default=0)


def settle_loops(parts: RunParts, together: Agreement) -> None:
    """Run the work that wrapped models postpone to the next forward, on all ranks together. Ranks: every rank."""
    waiting = [parts.loops.unsettled(model) for model in parts.objects.models]
    ready: list[list[bool]] = together.share([action is not None for action in waiting])
    for index, action in enumerate(waiting):
        if action is not None and all(rank[index : index + 1] == [True] for rank in ready):
            action()


def collect(parts: RunParts, fmt: Format, weights: Sequence[Mapping[str, Any] | None]) -> StateTree:
    """Return the run's state; `weights` per model are the state dicts edited by save hooks (None: not edited).

    Local: each rank independently.
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
        found[numbered_name("loader", index)] = packed(loader.saved_state(), "loader", per_rank=True)
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
    """Yield every whole buffer of every model under one name."""
    for index, model in enumerate(models):
        for name, buffer in model.named_buffers():
            if not is_dtensor(buffer) and buffer.device.type != "meta":
                yield f"{numbered_name('model', index)}/{plain_name(name)}", buffer.detach()


def packed(value: Any, kind: str, fmt: Format = "safetensors", per_rank: bool = False, where: str = "") -> Component:
    """Return a component of nested state."""
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
    """Return a component that is not tensors alone, unpacked; its tensors are copies, independent of the files."""
    found = checkpoint.component(name, rank)
    tensors = {key: whole(pieces, key).clone() for key, pieces in found.pieces.items()}
    tensors |= {alias: tensors[key] for alias, key in found.aliases.items()}
    if found.data is None:
        return tensors
    return unpack(found.data, tensors)


SaveHook = Callable[[list[nn.Module], list[dict[str, Any]], str], None]  # Any: state dicts hold extra state
LoadHook = Callable[[list[nn.Module], str], None]


class HookHandle:
    """Handle that removes a hook."""

    def __init__(self, hooks: dict[int, Any], key: int) -> None:  # Any: hooks of either kind
        self._hooks = hooks
        self._key = key

    def remove(self) -> None:
        """Remove the hook; safe to call repeatedly."""
        self._hooks.pop(self._key, None)


def run_save_hooks(
    hooks: Mapping[int, SaveHook], parts: RunParts, folder: str, together: Agreement
) -> list[Mapping[str, Any] | None]:
    """Run the save hooks and return each model's edited weights; None where there is no hook. Ranks: every rank.

    Scripts write models in custom formats, and remove the weights, on the main process only: weights that are removed
    there are removed on every rank, and no others.
    """
    models = list(parts.plain_models())
    given: list[dict[str, Any]] = [dict(model.state_dict()) for model in models] if hooks else []
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
    if len(on_main) != len(own):  # ranks hold different models: refused by name when the state is compared
        return own
    return [weight if stays else {} for weight, stays in zip(own, on_main, strict=True)]


def run_load_hooks(hooks: Mapping[int, LoadHook], parts: RunParts, folder: str) -> list[nn.Module | None]:
    """Run the load hooks and return the models that remain to be loaded, None in place of the others."""
    given = list(parts.plain_models())
    models = list(given)
    for hook in list(hooks.values()):
        _call(hook, models, folder)
    left = {id(model) for model in models}
    return [model if id(model) in left else None for model in given]


def _call(hook: Callable[..., None], *given: Any) -> None:  # Any: arguments of hooks of either kind
    try:
        hook(*given)
    except Exception as error:  # of any type: other ranks must learn of it
        name = getattr(hook, "__qualname__", type(hook).__qualname__)
        raise HookError(f"the hook {name} raised {type(error).__name__}: {error}") from error
