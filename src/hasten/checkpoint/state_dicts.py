"""Models and optimizers as components: state dicts by canonical parameter name, planned and then loaded in place."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from hasten.checkpoint.base import Component, Format, Json, Slice, as_stored, local_data
from hasten.checkpoint.eight_bit import (
    eight_bit_entries,
    from_entries,
    is_eight_bit,
    is_entries,
)
from hasten.checkpoint.format.formats import Piece
from hasten.checkpoint.format.packing import TAG, pack, unpack
from hasten.checkpoint.reader import StoredComponent
from hasten.checkpoint.reshard import Copy, join_pieces, plan_copies
from hasten.errors import CheckpointError, CorruptCheckpointError, OtherModelError
from hasten.modules.names import is_dtensor, plain_name, stage_part
from hasten.modules.quantized import (
    ByteLayout,
    copy_inner_tensors,
    from_bytes,
    is_torchao,
    to_bytes,
)


# -- models --------------------------------------------------------------------------------------------------------
def model_component(
    model: nn.Module,
    fmt: Format = "safetensors",
    weights: Mapping[str, Any] | None = None,
) -> Component:
    """Return the model's state as a component; `weights` replace the state when a save hook has edited it."""
    tensors: dict[str, Tensor | Slice] = {}
    extra: dict[str, Any] = {}
    for key, value in (
        model.state_dict(keep_vars=True) if weights is None else weights
    ).items():
        if isinstance(value, Tensor):
            tensors[plain_name(key)] = (
                to_bytes(value)[0] if is_torchao(value) else as_stored(value)
            )
        else:
            extra[plain_name(key)] = value
    data = None
    if extra and fmt == "torch":  # the file then holds the state dict unchanged
        data, tensors = pack({**tensors, **extra})
    elif extra:
        data, more = pack(extra, "extra_state")
        tensors.update(more)
    buffers = set()
    for name, _ in model.named_buffers(remove_duplicate=False):
        buffers.add(plain_name(name))
    return Component(
        tensors, data, "model", fmt, main_only=frozenset(buffers & tensors.keys())
    )


@dataclass(slots=True)
class LoadReport:
    """Names that did not match, for strict=False."""

    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)


@dataclass(slots=True)
class ModelPlan:
    """Copies that load a model, planned and checked before any tensor changes."""

    model: nn.Module
    copies: list[Copy] = field(default_factory=list)
    by_method: dict[str, Any] = field(default_factory=dict)
    """State that cannot be copied in place: extra state, and tensors that hooks create."""
    quantized: list[tuple[Tensor, Tensor, ByteLayout]] = field(default_factory=list)
    """Quantized weights of torchao, the bytes that are loaded for them, and the layout of the bytes."""
    report: LoadReport = field(default_factory=LoadReport)

    def finish(self) -> None:
        """Load the state that cannot be copied in place."""
        for weight, data, layout in self.quantized:
            copy_inner_tensors(from_bytes(data, layout), weight)
        if self.by_method:
            self.model.load_state_dict(self.by_method, strict=False)


def plan_model(
    model: nn.Module, found: StoredComponent, strict: bool = True
) -> ModelPlan:
    """Check the model against a checkpoint and plan the copies.

    Raises: OtherModelError naming missing and unexpected tensors and those of another shape or dtype, when strict.
    """
    plan = ModelPlan(model)
    state = {}
    for key, value in model.state_dict(keep_vars=True).items():
        state[plain_name(key)] = (key, value)
    live = set(map(id, (*model.parameters(), *model.buffers())))
    extra = extra_state(found) if found.data is not None else {}
    stored = {*found.pieces, *found.aliases} - (tensor_keys(extra) if extra else set())
    plan.report.missing = sorted(state.keys() - stored - extra.keys())
    plan.report.unexpected = sorted((stored | extra.keys()) - state.keys())
    if plan.report.unexpected:
        plan.report.unexpected = sorted(
            {*plan.report.unexpected} - names_of_other_stages(model)
        )
    if strict and (plan.report.missing or plan.report.unexpected):
        raise OtherModelError(
            f"{found.name}: the checkpoint lacks {few(plan.report.missing)} and has {few(plan.report.unexpected)}, "
            "which the model does not. Nothing was loaded. Build the model as it was when it was saved, or load with "
            "strict=False."
        )
    for name in sorted(state.keys() & stored):
        key, value = state[name]
        if id(value) in live and isinstance(value, Tensor):
            _plan_tensor(plan, found, name, value, strict)
        else:
            plan.by_method[key] = join_pieces(found.of(name), name)
    if extra.keys() & state.keys():
        values = unpack(
            extra,
            {
                key: join_pieces(pieces, key).clone()
                for key, pieces in found.pieces.items()
            },
        )
        plan.by_method.update(
            {state[name][0]: value for name, value in values.items() if name in state}
        )
    return plan


def _plan_tensor(
    plan: ModelPlan, found: StoredComponent, name: str, value: Tensor, strict: bool
) -> None:
    pieces = found.of(name)
    if is_torchao(value):
        data, layout = to_bytes(value)
        plan.quantized.append((value, data, layout))
        value = data
    target, stored_dtype = as_stored(value), pieces[0].data.dtype
    if strict and stored_dtype != value.dtype:
        raise OtherModelError(
            f"{found.name}: {name} is {value.dtype} here and {stored_dtype} in the checkpoint; a cast would change its "
            "numbers. Nothing was loaded. Build the model in the dtype it was saved in, or load with strict=False."
        )
    if not strict and tuple(pieces[0].shape) != tuple(target.shape):
        plan.report.skipped.append(name)
        return
    plan.copies += plan_copies(f"{found.name}: {name}", target, pieces)


def extra_state(found: StoredComponent) -> dict[str, Json]:
    """Return the packed values of a model's component that are not plain tensors, by name."""
    data = found.data if isinstance(found.data, dict) else {}
    return {
        key: value
        for key, value in data.items()
        if value != {TAG: "tensor", "key": key}
    }


def tensor_keys(data: Json) -> set[str]:
    """Return the keys of all tensors that packed data refers to."""
    if isinstance(data, list):
        return {key for item in data for key in tensor_keys(item)}
    if not isinstance(data, dict):
        return set()
    own = (
        {str(data["key"])}
        if TAG in data and "key" in data and not isinstance(data["key"], dict)
        else set()
    )
    return own | {key for item in data.values() for key in tensor_keys(item)}


def few(names: list[str]) -> str:
    """Return the first names of a list as text."""
    if not names:
        return "nothing"
    return ", ".join(names[:4]) + (
        f" and {len(names) - 4} more" if len(names) > 4 else ""
    )


# -- names over several models and pipeline stages ------------------------------------------------------------------
def model_names(models: Sequence[nn.Module]) -> Iterator[tuple[str, str, nn.Module]]:
    """Yield each model with the name of its component and the prefix of its parameters in optimizer state."""
    for index, model in enumerate(models):
        yield (
            (f"model_{index}", f"model_{index}.", model)
            if index
            else ("model", "", model)
        )


def parameter_names(models: Sequence[nn.Module]) -> dict[int, str]:
    """Return canonical names by parameter id; from the second model on, names are prefixed with the model's number."""
    names: dict[int, str] = {}
    for _, prefix, model in model_names(models):
        part = stage_part(model)
        for name, parameter in model.named_parameters():
            known = (
                plain_name(name) if part is None else part.whole_name(plain_name(name))
            )
            names.setdefault(id(parameter), prefix + known)
    return names


def names_of_other_stages(model: nn.Module) -> frozenset[str]:
    """Return the names of the whole model's state that this rank's pipeline stage does not hold."""
    part = stage_part(model)
    return (
        frozenset()
        if part is None
        else frozenset(part.state_keys)
        - {plain_name(key) for key in model.state_dict()}
    )


def names_elsewhere(
    models: Sequence[nn.Module], here: Mapping[int, str]
) -> frozenset[str]:
    """Return the checkpoint names of the parameters that only other pipeline stages hold."""
    found: set[str] = set()
    for _, prefix, model in model_names(models):
        part = stage_part(model)
        found |= set() if part is None else {prefix + name for name in part.parameters}
    return frozenset(found - set(here.values()))


# -- optimizers ----------------------------------------------------------------------------------------------------
def optimizer_component(
    optimizer: torch.optim.Optimizer, names: Mapping[int, str]
) -> Component:
    """Return the optimizer's state keyed by parameter names, as `torch.load("optimizer.bin")` shows it."""
    groups = _group_names(optimizer, names)
    flat = list(chain.from_iterable(groups))
    by_name = optimizer.state_dict()
    state, options = {}, []
    for key, value in by_name["state"].items():
        state[_name(flat, key)] = _stored(value)
    for group, group_names in zip(by_name["param_groups"], groups, strict=True):
        options.append({**group, "params": group_names})
    data, tensors = pack({**by_name, "state": state, "param_groups": options})
    return Component(tensors, data, "optimizer", "torch")


def _group_names(
    optimizer: torch.optim.Optimizer, names: Mapping[int, str]
) -> list[list[str]]:
    groups = []
    for number, group in enumerate(optimizer.param_groups):
        group_names = []
        for index, parameter in enumerate(group["params"]):
            name = names.get(id(parameter))
            if name is None:
                raise CheckpointError(
                    f"{type(optimizer).__name__}: parameter {index} of parameter group {number}, of shape {tuple(parameter.shape)}, "
                    "is in no prepared model, so a checkpoint could not name it. Prepare its model, or remove it from the optimizer."
                )
            group_names.append(name)
        groups.append(group_names)
    return groups


# Any: torch uses indices; custom optimizers may add keys
def _name(flat: Sequence[str], key: Any) -> str:
    return flat[key] if isinstance(key, int) and 0 <= key < len(flat) else str(key)


def _stored(value: Any) -> Any:  # Any: state is nested freely
    if isinstance(value, Tensor):
        if type(value) is not Tensor and is_eight_bit(value):
            return eight_bit_entries(value)
        found = as_stored(value)
        if hasattr(local := local_data(found), "__tensor_flatten__"):
            raise CheckpointError(
                f"the optimizer's state holds a {type(local).__name__}, a tensor of {type(local).__module__.partition('.')[0]} that "
                "checkpoints cannot hold, so a resumed run would lose it; use an optimizer with plain tensors as state, such as "
                "AdamW of torch, or AdamW8bit of torchao."
            )
        return found
    if type(value) is dict:
        return dict(zip(value, map(_stored, value.values()), strict=True))
    if type(value) in (list, tuple):
        return type(value)(map(_stored, value))
    return value


@dataclass(slots=True)
class OptimizerPlan:
    """Copies that load an optimizer, planned and checked before any tensor changes."""

    optimizer: torch.optim.Optimizer
    state: dict[str, Any]
    parameters: list[Tensor]
    copies: list[Copy] = field(default_factory=list)

    def finish(self) -> None:
        """Load the filled state into the optimizer.

        torch casts state to the parameter's dtype on load; the uncast tensors are restored afterwards.
        """
        for index, values in self.state["state"].items():
            for key, value in values.items() if isinstance(values, dict) else ():
                if isinstance(value, Mapping) and is_entries(value):
                    values[key] = from_entries(value, self.parameters[index].dtype)
        try:
            self.optimizer.load_state_dict(self.state)
        except (
            LookupError,
            TypeError,
            ValueError,
            AttributeError,
            RuntimeError,
        ) as error:
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
                if (
                    isinstance(value, Tensor)
                    and isinstance(now, Tensor)
                    and now.dtype != value.dtype
                ):
                    held[key] = value


def plan_optimizer(
    optimizer: torch.optim.Optimizer,
    names: Mapping[int, str],
    found: StoredComponent,
    strict: bool = True,
    elsewhere: frozenset[str] = frozenset(),
) -> OptimizerPlan:
    """Check the optimizer against a checkpoint and plan the copies into its (new or existing) state.

    `elsewhere` are parameters that other pipeline stages hold; their state is skipped.
    Raises: CheckpointError when groups or shapes differ.
    """
    groups, live = _group_names(optimizer, names), []
    for group in optimizer.param_groups:
        live += group["params"]
    flat = list(chain.from_iterable(groups))
    plan = OptimizerPlan(optimizer, {}, live)
    # for state that other tools saved by position
    by_index = dict(zip(map(str, range(len(live))), live, strict=True))
    parameters = {**by_index, **dict(zip(flat, live, strict=True))}
    saved = unpack(found.data, _plan_state(plan, found, parameters, elsewhere))
    if (
        not isinstance(saved, dict)
        or not isinstance(saved.get("state"), dict)
        or "param_groups" not in saved
    ):
        raise CorruptCheckpointError(
            f"{found.name}: holds no optimizer state. Nothing was loaded."
        )
    saved = _by_name(saved, flat)
    if elsewhere:
        saved = _without(saved, elsewhere)
    _check_groups(found.name, saved["param_groups"], groups)
    index = dict(zip(flat, range(len(flat)), strict=True))
    if strict and (strangers := saved["state"].keys() - index.keys()):
        raise CheckpointError(
            f"{found.name}: the checkpoint has state of {sorted(strangers)[:4]}, which this optimizer does not hold. Nothing "
            "was loaded. Create the optimizer over the parameters it had, or load with strict=False."
        )
    state, options = {}, []
    for name, value in saved["state"].items():
        if name in index:
            state[index[name]] = value
    for saved_group, own in zip(saved["param_groups"], groups, strict=True):
        options.append({**saved_group, "params": list(map(index.__getitem__, own))})
    plan.state = {**saved, "state": state, "param_groups": options}
    return plan


def _plan_state(
    plan: OptimizerPlan,
    found: StoredComponent,
    parameters: Mapping[str, Tensor],
    elsewhere: frozenset[str],
) -> dict[str, Tensor | Slice]:
    """Return a tensor to load each stored tensor into, and add the copies that fill it to the plan."""
    targets: dict[str, Tensor | Slice] = {}
    others = dict.fromkeys(elsewhere, torch.empty(0))
    on_device: set[int] = set()  # parameters whose step counters are on the device too
    for group in plan.optimizer.param_groups:
        if group.get("capturable") or group.get("fused"):
            on_device.update(map(id, group["params"]))
    for key, pieces in found.pieces.items():
        if others and _parameter_of(key, others)[0] is not None:
            targets[key] = torch.empty(
                tuple(pieces[0].shape), dtype=pieces[0].data.dtype, device="meta"
            )
            continue
        parameter, state_key = _parameter_of(key, parameters)
        target = targets[key] = _target(
            plan.optimizer, parameter, state_key, pieces[0], id(parameter) in on_device
        )
        stored = target if isinstance(target, Slice) else as_stored(target)
        plan.copies += plan_copies(f"{found.name}: {key}", stored, pieces)
    for alias, key in found.aliases.items():
        targets[alias] = targets[key]
    return targets


def _target(
    optimizer: torch.optim.Optimizer,
    parameter: Tensor | None,
    state_key: str,
    piece: Piece,
    counts_on_device: bool,
) -> Tensor | Slice:
    """Return the optimizer's existing tensor if it fits, else a new one."""
    shape, dtype = tuple(piece.shape), piece.data.dtype
    if parameter is None:
        return torch.empty(shape, dtype=dtype)
    # the engine stores state in a custom layout
    if (own := getattr(optimizer, "state_room", None)) is not None:
        place: Tensor | Slice = own(parameter, state_key, shape, dtype)
        return place
    held = optimizer.state.get(parameter, {}).get(state_key) if state_key else None
    if isinstance(held, Tensor) and tuple(held.shape) == shape and held.dtype == dtype:
        return held
    if shape == () and not counts_on_device:
        return torch.empty(shape, dtype=dtype)
    if is_dtensor(parameter) and tuple(parameter.shape) == shape:
        return torch.empty_like(parameter, dtype=dtype, requires_grad=False)
    device = parameter.to_local().device if is_dtensor(parameter) else parameter.device
    return torch.empty(shape, dtype=dtype, device=device)


def _parameter_of(
    key: str, parameters: Mapping[str, Tensor]
) -> tuple[Tensor | None, str]:
    """Return the parameter that a stored tensor belongs to, and the key in its state; None for other tensors."""
    if not key.startswith("state/"):
        return None, ""
    name, _, rest = key.removeprefix("state/").rpartition("/")
    while name:
        if name in parameters:
            return parameters[name], rest if "/" not in rest else ""
        name, _, more = name.rpartition("/")
        rest = f"{more}/{rest}"
    return None, ""


# Any: an optimizer's state dict
def _without(saved: dict[str, Any], elsewhere: frozenset[str]) -> dict[str, Any]:
    """Return a state dict without the parameters that other pipeline stages hold."""
    if not isinstance(saved["param_groups"], list):
        return saved
    groups = [
        {**group, "params": [name for name in group["params"] if name not in elsewhere]}
        if isinstance(group, dict) and isinstance(group.get("params"), list)
        else group
        for group in saved["param_groups"]
    ]
    state = {
        name: values for name, values in saved["state"].items() if name not in elsewhere
    }
    return {**saved, "state": state, "param_groups": groups}


# Any: an optimizer's state dict
def _by_name(saved: dict[str, Any], flat: Sequence[str]) -> dict[str, Any]:
    """Return a state dict keyed by parameter names, given one keyed by indices as torch's are."""
    groups = saved["param_groups"]
    keys: list[Any] = []
    for group in groups if isinstance(groups, list) else ():
        if isinstance(group, dict) and isinstance(group.get("params"), list):
            keys += group["params"]
    if not keys or set(map(type, keys)) != {int}:
        return saved
    return {
        **saved,
        "state": {_name(flat, key): value for key, value in saved["state"].items()},
        "param_groups": [
            {**group, "params": [_name(flat, key) for key in group["params"]]}
            for group in groups
        ],
    }


def _check_groups(where: str, saved: Any, groups: list[list[str]]) -> None:
    for group in saved if isinstance(saved, list) else [None]:
        if not isinstance(group, dict) or not isinstance(group.get("params"), list):
            raise CorruptCheckpointError(
                f"{where}: its parameter groups cannot be read. Nothing was loaded."
            )
    if len(saved) != len(groups):
        raise CheckpointError(
            f"{where}: the checkpoint has {len(saved)} parameter groups, the optimizer {len(groups)}; their options "
            "would be mixed up. Nothing was loaded. Create the optimizer with the same groups."
        )
    for number, (group, ours) in enumerate(zip(saved, groups, strict=True)):
        missing, extra = (
            set(ours) - set(group["params"]),
            set(group["params"]) - set(ours),
        )
        if missing or extra:
            raise CheckpointError(
                f"{where}: parameter group {number} lacks {sorted(missing)[:4]} and also has {sorted(extra)[:4]}. "
                "Nothing was loaded. Create the optimizer over the same parameters in the same groups."
            )
