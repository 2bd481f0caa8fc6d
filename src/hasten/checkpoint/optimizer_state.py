"""Optimizers as components: state by parameter name, independent of parameter order, layout and world size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from hasten.checkpoint.base import Component, Slice
from hasten.checkpoint.format.formats import Piece
from hasten.checkpoint.format.packing import pack, unpack
from hasten.checkpoint.model_state import empty_like_parameter, model_names
from hasten.checkpoint.reader import FoundComponent
from hasten.checkpoint.reshard import Copy, as_stored, plan_copies
from hasten.errors import CheckpointError, CorruptCheckpointError
from hasten.modules.names import plain_name, stage_part


def parameter_names(models: Sequence[nn.Module]) -> dict[int, str]:
    """Return canonical names by parameter id; from the second model on, names are prefixed with the model's number."""
    names: dict[int, str] = {}
    for _, prefix, model in model_names(models):
        part = stage_part(model)
        for name, parameter in model.named_parameters():
            known = plain_name(name) if part is None else part.whole_name(plain_name(name))
            names.setdefault(id(parameter), prefix + known)
    return names


def _group_names(optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> list[list[str]]:
    return [
        [names.get(id(p), f"group_{g}.{i}") for i, p in enumerate(group["params"])]
        for g, group in enumerate(optimizer.param_groups)
    ]


def optimizer_component(optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> Component:
    """Return the optimizer's state keyed by parameter names, as `torch.load("optimizer.bin")` shows it."""
    groups = _group_names(optimizer, names)
    flat = [name for group in groups for name in group]
    state = optimizer.state_dict()
    by_name = {
        "state": {_name(flat, key): _stored(value) for key, value in state["state"].items()},
        "param_groups": [
            {**{k: v for k, v in group.items() if k != "params"}, "params": group_names}
            for group, group_names in zip(state["param_groups"], groups, strict=True)
        ],
        **{key: value for key, value in state.items() if key not in ("state", "param_groups")},
    }
    data, tensors = pack(by_name)
    return Component(tensors, data, "optimizer", "torch")


def _name(flat: Sequence[str], key: Any) -> str:  # Any: torch uses indices; custom optimizers may add keys
    return flat[key] if isinstance(key, int) and 0 <= key < len(flat) else str(key)


def _stored(value: Any) -> Any:  # Any: state is nested freely
    if isinstance(value, Tensor):
        return as_stored(value)
    if type(value) is dict:
        return {key: _stored(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_stored(item) for item in value)
    return value


@dataclass(slots=True)
class OptimizerPlan:
    """Copies that load an optimizer, planned and checked before any tensor changes."""

    optimizer: torch.optim.Optimizer
    state: dict[str, Any]
    parameters: dict[int, Tensor]
    copies: list[Copy] = field(default_factory=list)

    def finish(self) -> None:
        """Load the filled state into the optimizer.

        torch casts state to the parameter's dtype on load; the uncast tensors are restored afterwards.
        """
        try:
            self.optimizer.load_state_dict(self.state)
        except (LookupError, TypeError, ValueError, AttributeError, RuntimeError) as error:
            raise CorruptCheckpointError(
                f"{type(self.optimizer).__name__} does not accept the stored state ({type(error).__name__}: {error}): it "
                "was edited, or belongs to another optimizer. The run is as it was before; load another checkpoint."
            ) from error
        for index, values in self.state["state"].items():
            held = self.optimizer.state.get(self.parameters[index])
            if held is None or not isinstance(values, dict):
                continue
            for key, value in values.items():
                now = held.get(key)
                if isinstance(value, Tensor) and isinstance(now, Tensor) and now.dtype != value.dtype:
                    held[key] = value


def plan_optimizer(
    optimizer: torch.optim.Optimizer,
    names: Mapping[int, str],
    found: FoundComponent,
    strict: bool = True,
    elsewhere: frozenset[str] = frozenset(),
) -> OptimizerPlan:
    """Check the optimizer against a checkpoint and plan the copies into its (new or existing) state.

    `elsewhere` are parameters that other pipeline stages hold; their state is skipped.
    Raises: CheckpointError when groups or shapes differ.
    """
    groups = _group_names(optimizer, names)
    live = [p for group in optimizer.param_groups for p in group["params"]]
    flat = [name for group in groups for name in group]
    index = {name: i for i, name in enumerate(flat)}
    plan = OptimizerPlan(optimizer, {}, dict(enumerate(live)))
    by_place = {str(i): p for i, p in enumerate(live)}  # for state that other tools saved by position
    rooms = _Rooms(optimizer, {**by_place, **dict(zip(flat, live, strict=True))}, plan.copies, elsewhere)
    saved = unpack(found.data, rooms.of(found))
    if not isinstance(saved, dict) or not isinstance(saved.get("state"), dict) or "param_groups" not in saved:
        raise CorruptCheckpointError(f"{found.name}: holds no optimizer state. Nothing was loaded.")
    saved = _here(by_name(saved, flat), elsewhere)
    _check_groups(found.name, saved["param_groups"], groups)
    options = [
        {**saved_group, "params": [index[name] for name in group]}
        for saved_group, group in zip(saved["param_groups"], groups, strict=True)
    ]
    if strict and (strangers := [name for name in saved["state"] if name not in index]):
        raise CheckpointError(
            f"{found.name}: the checkpoint has state of {strangers[:4]}, which this optimizer does not hold. Nothing "
            "was loaded. Create the optimizer over the parameters it had, or load with strict=False."
        )
    plan.state = {
        **saved,
        "state": {index[name]: value for name, value in saved["state"].items() if name in index},
        "param_groups": options,
    }
    return plan


def _here(saved: dict[str, Any], elsewhere: frozenset[str]) -> dict[str, Any]:  # Any: an optimizer's state dict
    """Return a state dict without the parameters that other pipeline stages hold."""
    if not elsewhere or not isinstance(saved["param_groups"], list):
        return saved
    groups = [
        {**group, "params": [name for name in group["params"] if name not in elsewhere]}
        if isinstance(group, dict) and isinstance(group.get("params"), list)
        else group
        for group in saved["param_groups"]
    ]
    state = {name: values for name, values in saved["state"].items() if name not in elsewhere}
    return {**saved, "state": state, "param_groups": groups}


def by_name(saved: dict[str, Any], flat: Sequence[str]) -> dict[str, Any]:  # Any: an optimizer's state dict
    """Return a state dict keyed by parameter names, given one keyed by indices as torch's are."""
    groups = saved["param_groups"]
    if not isinstance(groups, list) or not any(isinstance(g, dict) and _counts(g.get("params")) for g in groups):
        return saved
    return {
        **saved,
        "state": {_name(flat, key): value for key, value in saved["state"].items()},
        "param_groups": [{**group, "params": [_name(flat, key) for key in group["params"]]} for group in groups],
    }


def _counts(params: Any) -> bool:
    return isinstance(params, list) and bool(params) and all(type(key) is int for key in params)


def _check_groups(where: str, saved: Any, groups: list[list[str]]) -> None:
    if not isinstance(saved, list) or any(
        not isinstance(g, dict) or not isinstance(g.get("params"), list) for g in saved
    ):
        raise CorruptCheckpointError(f"{where}: its parameter groups cannot be read. Nothing was loaded.")
    if len(saved) != len(groups):
        raise CheckpointError(
            f"{where}: the checkpoint has {len(saved)} parameter groups, the optimizer {len(groups)}; their options "
            "would be mixed up. Nothing was loaded. Create the optimizer with the same groups."
        )
    for number, (group, ours) in enumerate(zip(saved, groups, strict=True)):
        missing, extra = set(ours) - set(group["params"]), set(group["params"]) - set(ours)
        if missing or extra:
            raise CheckpointError(
                f"{where}: parameter group {number} lacks {sorted(missing)[:4]} and has {sorted(extra)[:4]} besides. "
                "Nothing was loaded. Create the optimizer over the same parameters in the same groups."
            )


class _Rooms:
    """Tensors to read the state into: the optimizer's existing ones where they fit, else new ones."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        parameters: Mapping[str, Tensor],
        copies: list[Copy],
        elsewhere: frozenset[str],
    ) -> None:
        self._elsewhere = elsewhere
        self._optimizer = optimizer
        self._parameters = parameters
        self._copies = copies
        self._on_device = {
            id(p)
            for group in optimizer.param_groups
            if group.get("capturable") or group.get("fused")
            for p in group["params"]
        }

    def of(self, found: FoundComponent) -> dict[str, Tensor | Slice]:
        """Return a tensor for every stored tensor, and add the copies that fill it."""
        rooms: dict[str, Tensor | Slice] = {}
        for key, pieces in found.pieces.items():
            if self._is_elsewhere(key):
                rooms[key] = torch.empty(tuple(pieces[0].shape), dtype=pieces[0].data.dtype, device="meta")
                continue
            room = self._room(key, pieces)
            rooms[key] = room
            target = room if isinstance(room, Slice) else as_stored(room)
            self._copies += plan_copies(f"{found.name}: {key}", target, pieces)
        for alias, key in found.aliases.items():
            rooms[alias] = rooms[key]
        return rooms

    def _room(self, key: str, pieces: Sequence[Piece]) -> Tensor | Slice:
        shape, dtype = tuple(pieces[0].shape), pieces[0].data.dtype
        parameter, state_key = self._owner(key)
        if parameter is None:
            return torch.empty(shape, dtype=dtype)
        if (
            own := getattr(self._optimizer, "state_room", None)
        ) is not None:  # the engine stores state in a custom layout
            place: Tensor | Slice = own(parameter, state_key, shape, dtype)
            return place
        held = self._optimizer.state.get(parameter, {}).get(state_key) if state_key else None
        if isinstance(held, Tensor) and tuple(held.shape) == shape and held.dtype == dtype:
            return held
        if shape == () and id(parameter) not in self._on_device:
            return torch.empty(shape, dtype=dtype)  # step counters stay on the host
        return empty_like_parameter(parameter, shape, dtype)

    def _is_elsewhere(self, key: str) -> bool:
        name = key.removeprefix("state/").rpartition("/")[0] if key.startswith("state/") else ""
        while name and self._elsewhere:
            if name in self._elsewhere:
                return True
            name = name.rpartition("/")[0]
        return False

    def _owner(self, key: str) -> tuple[Tensor | None, str]:
        if not key.startswith("state/"):
            return None, ""
        name, _, rest = key.removeprefix("state/").rpartition("/")
        while name:
            if name in self._parameters:
                return self._parameters[name], rest if "/" not in rest else ""
            name, _, more = name.rpartition("/")
            rest = f"{more}/{rest}"
        return None, ""
