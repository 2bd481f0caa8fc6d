"""Models and optimizers as components: state dicts by canonical parameter name, planned and then loaded in place."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Final

import torch
from torch import Tensor, nn

from hasten.checkpoint.base import Component, Format, Json, Slice
from hasten.checkpoint.eight_bit import (
    eight_bit_entries,
    from_entries,
    is_eight_bit,
    is_entries,
)
from hasten.checkpoint.format.formats import Piece, as_stored
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

_PLAIN_CLASSES: Final = (Tensor, nn.Parameter)


# -- models --------------------------------------------------------------------------------------------------------
def model_component(
    model: nn.Module,
    file_format: Format = "safetensors",
    weights: Mapping[str, Any] | None = None,
) -> Component:
    """Return the model's state as a component; `weights` replace the state when a save hook has edited it."""
    tensors: dict[str, Tensor | Slice] = {}
    extra_values: dict[str, Any] = {}
    if weights is None:
        weights = model.state_dict(keep_vars=True)
    for state_key, state_value in weights.items():
        tensor_name = plain_name(state_key)
        if not isinstance(state_value, Tensor):
            extra_values[tensor_name] = state_value
        elif type(state_value) not in _PLAIN_CLASSES and is_torchao(state_value):
            tensors[tensor_name] = to_bytes(state_value)[0]
        else:
            tensors[tensor_name] = as_stored(state_value)
    packed_state = None
    # the file then holds the state dict unchanged
    if extra_values and file_format == "torch":
        packed_state, tensors = pack({**tensors, **extra_values})
    elif extra_values:
        packed_state, extra_tensors = pack(extra_values, "extra_state")
        tensors.update(extra_tensors)
    buffer_names = set()
    for buffer_name, _ in model.named_buffers(remove_duplicate=False):
        buffer_names.add(plain_name(buffer_name))
    return Component(
        tensors,
        packed_state,
        "model",
        file_format,
        main_only=frozenset(buffer_names & tensors.keys()),
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
        for weight, loaded_bytes, byte_layout in self.quantized:
            copy_inner_tensors(from_bytes(loaded_bytes, byte_layout), weight)
        if self.by_method:
            self.model.load_state_dict(self.by_method, strict=False)


def plan_model(
    model: nn.Module, stored_component: StoredComponent, strict: bool = True
) -> ModelPlan:
    """Check the model against a checkpoint and plan the copies.

    Raises: OtherModelError naming missing and unexpected tensors and those of another shape or dtype, when strict.
    """
    model_plan = ModelPlan(model)
    live_state = {}
    for state_key, live_value in model.state_dict(keep_vars=True).items():
        live_state[plain_name(state_key)] = (state_key, live_value)
    live_ids = set(map(id, (*model.parameters(), *model.buffers())))
    if stored_component.data is not None:
        extra_values = extra_state(stored_component)
    else:
        extra_values = {}
    stored_names = {*stored_component.pieces, *stored_component.aliases} - (
        tensor_keys(extra_values) if extra_values else set()
    )
    model_plan.report.missing = sorted(
        live_state.keys() - stored_names - extra_values.keys()
    )
    model_plan.report.unexpected = sorted(
        (stored_names | extra_values.keys()) - live_state.keys()
    )
    if model_plan.report.unexpected:
        model_plan.report.unexpected = sorted(
            {*model_plan.report.unexpected} - names_of_other_stages(model)
        )
    if strict and (model_plan.report.missing or model_plan.report.unexpected):
        raise OtherModelError(
            f"{stored_component.name}: the checkpoint lacks {first_names(model_plan.report.missing)} and has {first_names(model_plan.report.unexpected)}, "
            "which the model does not. Nothing was loaded. Build the model as it was when it was saved, or load with "
            "strict=False."
        )
    for tensor_name in sorted(live_state.keys() & stored_names):
        state_key, live_value = live_state[tensor_name]
        if id(live_value) in live_ids and isinstance(live_value, Tensor):
            _plan_tensor(model_plan, stored_component, tensor_name, live_value, strict)
        else:
            model_plan.by_method[state_key] = join_pieces(
                stored_component.pieces_of(tensor_name), tensor_name
            )
    if extra_values.keys() & live_state.keys():
        unpacked_values = unpack(
            extra_values,
            {
                state_key: join_pieces(pieces, state_key).clone()
                for state_key, pieces in stored_component.pieces.items()
            },
        )
        model_plan.by_method.update(
            {
                live_state[tensor_name][0]: live_value
                for tensor_name, live_value in unpacked_values.items()
                if tensor_name in live_state
            }
        )
    return model_plan


def _plan_tensor(
    model_plan: ModelPlan,
    stored_component: StoredComponent,
    tensor_name: str,
    live_tensor: Tensor,
    strict: bool,
) -> None:
    pieces = stored_component.pieces_of(tensor_name)
    if type(live_tensor) not in _PLAIN_CLASSES and is_torchao(live_tensor):
        tensor_bytes, byte_layout = to_bytes(live_tensor)
        model_plan.quantized.append((live_tensor, tensor_bytes, byte_layout))
        live_tensor = tensor_bytes
    target = as_stored(live_tensor)
    stored_dtype = pieces[0].data.dtype
    if strict and stored_dtype != live_tensor.dtype:
        raise OtherModelError(
            f"{stored_component.name}: {tensor_name} is {live_tensor.dtype} here and {stored_dtype} in the checkpoint; a cast would change its "
            "numbers. Nothing was loaded. Build the model in the dtype it was saved in, or load with strict=False."
        )
    if not strict and tuple(pieces[0].shape) != tuple(target.shape):
        model_plan.report.skipped.append(tensor_name)
        return
    model_plan.copies += plan_copies(
        f"{stored_component.name}: {tensor_name}", target, pieces
    )


def extra_state(stored_component: StoredComponent) -> dict[str, Json]:
    """Return the packed values of a model's component that are not plain tensors, by name."""
    if isinstance(stored_component.data, dict):
        packed_state = stored_component.data
    else:
        packed_state = {}
    return {
        state_key: packed_value
        for state_key, packed_value in packed_state.items()
        if packed_value != {TAG: "tensor", "key": state_key}
    }


def tensor_keys(packed_state: Json) -> set[str]:
    """Return the keys of all tensors that packed data refers to."""
    if isinstance(packed_state, list):
        return {key for inner_state in packed_state for key in tensor_keys(inner_state)}
    if not isinstance(packed_state, dict):
        return set()
    if (
        TAG in packed_state
        and "key" in packed_state
        and not isinstance(packed_state["key"], dict)
    ):
        own_keys = {str(packed_state["key"])}
    else:
        own_keys = set()
    return own_keys | {
        key for inner_state in packed_state.values() for key in tensor_keys(inner_state)
    }


def first_names(names: list[str]) -> str:
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
    names_by_id: dict[int, str] = {}
    for index, model in enumerate(models):
        prefix = f"model_{index}." if index else ""
        stage = stage_part(model)
        for local_name, parameter in model.named_parameters():
            parameter_name = plain_name(local_name)
            if stage is not None:
                parameter_name = stage.whole_name(parameter_name)
            names_by_id.setdefault(id(parameter), prefix + parameter_name)
    return names_by_id


def names_of_other_stages(model: nn.Module) -> frozenset[str]:
    """Return the names of the whole model's state that this rank's pipeline stage does not hold."""
    stage = stage_part(model)
    if stage is None:
        return frozenset()
    return frozenset(stage.state_keys) - {
        plain_name(state_key) for state_key in model.state_dict()
    }


def find_other_stage_names(
    models: Sequence[nn.Module], own_names: Mapping[int, str]
) -> frozenset[str]:
    """Return the checkpoint names of the parameters that only other pipeline stages hold."""
    stage_names: set[str] = set()
    for index, model in enumerate(models):
        stage = stage_part(model)
        for parameter_name in () if stage is None else stage.parameters:
            stage_names.add(
                f"model_{index}.{parameter_name}" if index else parameter_name
            )
    return frozenset(stage_names - set(own_names.values()))


# -- optimizers ----------------------------------------------------------------------------------------------------
def optimizer_component(
    optimizer: torch.optim.Optimizer, names_by_id: Mapping[int, str]
) -> Component:
    """Return the optimizer's state keyed by parameter names, as `torch.load("optimizer.bin")` shows it."""
    names_of_groups = _group_names(optimizer, names_by_id)
    flat_names = list(chain.from_iterable(names_of_groups))
    live_state = optimizer.state_dict()
    state_by_name = {}
    group_options = []
    for state_key, parameter_state in live_state["state"].items():
        # torch uses indices; custom optimizers may add keys
        parameter_name = str(state_key)
        if isinstance(state_key, int) and 0 <= state_key < len(flat_names):
            parameter_name = flat_names[state_key]
        state_by_name[parameter_name] = _as_stored_state(parameter_state)
    for group, group_names in zip(
        live_state["param_groups"], names_of_groups, strict=True
    ):
        group_options.append({**group, "params": group_names})
    packed_state, tensors = pack(
        {**live_state, "state": state_by_name, "param_groups": group_options}
    )
    return Component(tensors, packed_state, "optimizer", "torch")


def _group_names(
    optimizer: torch.optim.Optimizer, names_by_id: Mapping[int, str]
) -> list[list[str]]:
    names_of_groups = []
    for group_index, group in enumerate(optimizer.param_groups):
        group_names = []
        for parameter_index, parameter in enumerate(group["params"]):
            parameter_name = names_by_id.get(id(parameter))
            if parameter_name is None:
                raise CheckpointError(
                    f"{type(optimizer).__name__}: parameter {parameter_index} of parameter group {group_index}, of shape {tuple(parameter.shape)}, "
                    "is in no prepared model, so a checkpoint could not name it. Prepare its model, or remove it from the optimizer."
                )
            group_names.append(parameter_name)
        names_of_groups.append(group_names)
    return names_of_groups


# Any: torch uses indices; custom optimizers may add keys
def _name_of_key(flat_names: Sequence[str], state_key: Any) -> str:
    if isinstance(state_key, int) and 0 <= state_key < len(flat_names):
        return flat_names[state_key]
    return str(state_key)


def _as_stored_state(state_value: Any) -> Any:  # Any: state is nested freely
    if isinstance(state_value, Tensor):
        if type(state_value) is not Tensor and is_eight_bit(state_value):
            return eight_bit_entries(state_value)
        stored_tensor = as_stored(state_value)
        local_tensor = stored_tensor
        if isinstance(stored_tensor, Slice):
            local_tensor = stored_tensor.data
        if hasattr(local_tensor, "__tensor_flatten__"):
            raise CheckpointError(
                f"the optimizer's state holds a {type(local_tensor).__name__}, a tensor of {type(local_tensor).__module__.partition('.')[0]} that "
                "checkpoints cannot hold, so a resumed run would lose it; use an optimizer with plain tensors as state, such as "
                "AdamW of torch, or AdamW8bit of torchao."
            )
        return stored_tensor
    if type(state_value) is dict:
        return dict(
            zip(state_value, map(_as_stored_state, state_value.values()), strict=True)
        )
    if type(state_value) in (list, tuple):
        return type(state_value)(map(_as_stored_state, state_value))
    return state_value


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
        for parameter_index, loaded_state in self.state["state"].items():
            for state_key, loaded_value in (
                loaded_state.items() if isinstance(loaded_state, dict) else ()
            ):
                if isinstance(loaded_value, Mapping) and is_entries(loaded_value):
                    loaded_state[state_key] = from_entries(
                        loaded_value, self.parameters[parameter_index].dtype
                    )
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
        for parameter_index, loaded_state in self.state["state"].items():
            live_state = self.optimizer.state.get(self.parameters[parameter_index])
            if live_state is None or not isinstance(loaded_state, dict):
                continue
            for state_key, loaded_value in loaded_state.items():
                live_value = live_state.get(state_key)
                if (
                    isinstance(loaded_value, Tensor)
                    and isinstance(live_value, Tensor)
                    and live_value.dtype != loaded_value.dtype
                ):
                    live_state[state_key] = loaded_value


def plan_optimizer(
    optimizer: torch.optim.Optimizer,
    names_by_id: Mapping[int, str],
    stored_component: StoredComponent,
    strict: bool = True,
    other_stage_names: frozenset[str] = frozenset(),
) -> OptimizerPlan:
    """Check the optimizer against a checkpoint and plan the copies into its (new or existing) state.

    `elsewhere` are parameters that other pipeline stages hold; their state is skipped.
    Raises: CheckpointError when groups or shapes differ.
    """
    names_of_groups = _group_names(optimizer, names_by_id)
    live_parameters = []
    for group in optimizer.param_groups:
        live_parameters += group["params"]
    flat_names = list(chain.from_iterable(names_of_groups))
    optimizer_plan = OptimizerPlan(optimizer, {}, live_parameters)
    # for state that other tools saved by position
    by_index = dict(
        zip(map(str, range(len(live_parameters))), live_parameters, strict=True)
    )
    parameters_by_name = {
        **by_index,
        **dict(zip(flat_names, live_parameters, strict=True)),
    }
    saved_state = unpack(
        stored_component.data,
        _plan_state(
            optimizer_plan, stored_component, parameters_by_name, other_stage_names
        ),
    )
    if (
        not isinstance(saved_state, dict)
        or not isinstance(saved_state.get("state"), dict)
        or "param_groups" not in saved_state
    ):
        raise CorruptCheckpointError(
            f"{stored_component.name}: holds no optimizer state. Nothing was loaded."
        )
    saved_state = _keyed_by_name(saved_state, flat_names)
    if other_stage_names:
        saved_state = _without_other_stages(saved_state, other_stage_names)
    _check_groups(stored_component.name, saved_state["param_groups"], names_of_groups)
    index_by_name = dict(zip(flat_names, range(len(flat_names)), strict=True))
    if strict and (unknown_names := saved_state["state"].keys() - index_by_name.keys()):
        raise CheckpointError(
            f"{stored_component.name}: the checkpoint has state of {sorted(unknown_names)[:4]}, which this optimizer does not hold. Nothing "
            "was loaded. Create the optimizer over the parameters it had, or load with strict=False."
        )
    state_by_index = {}
    group_options = []
    for parameter_name, parameter_state in saved_state["state"].items():
        if parameter_name in index_by_name:
            state_by_index[index_by_name[parameter_name]] = parameter_state
    for saved_group, group_names in zip(
        saved_state["param_groups"], names_of_groups, strict=True
    ):
        group_options.append(
            {**saved_group, "params": list(map(index_by_name.__getitem__, group_names))}
        )
    optimizer_plan.state = {
        **saved_state,
        "state": state_by_index,
        "param_groups": group_options,
    }
    return optimizer_plan


def _plan_state(
    optimizer_plan: OptimizerPlan,
    stored_component: StoredComponent,
    parameters_by_name: Mapping[str, Tensor],
    other_stage_names: frozenset[str],
) -> dict[str, Tensor | Slice]:
    """Return a tensor to load each stored tensor into, and add the copies that fill it to the plan."""
    target_tensors: dict[str, Tensor | Slice] = {}
    placeholders = dict.fromkeys(other_stage_names, torch.empty(0))
    on_device: set[int] = set()  # parameters whose step counters are on the device too
    for group in optimizer_plan.optimizer.param_groups:
        if group.get("capturable") or group.get("fused"):
            on_device.update(map(id, group["params"]))
    for tensor_key, pieces in stored_component.pieces.items():
        if placeholders and _parameter_of(tensor_key, placeholders)[0] is not None:
            target_tensors[tensor_key] = torch.empty(
                tuple(pieces[0].shape), dtype=pieces[0].data.dtype, device="meta"
            )
            continue
        parameter, state_key = _parameter_of(tensor_key, parameters_by_name)
        target = target_tensors[tensor_key] = _find_target(
            optimizer_plan.optimizer,
            parameter,
            state_key,
            pieces[0],
            id(parameter) in on_device,
        )
        stored_target = target if isinstance(target, Slice) else as_stored(target)
        optimizer_plan.copies += plan_copies(
            f"{stored_component.name}: {tensor_key}", stored_target, pieces
        )
    for alias, tensor_key in stored_component.aliases.items():
        target_tensors[alias] = target_tensors[tensor_key]
    return target_tensors


def _find_target(
    optimizer: torch.optim.Optimizer,
    parameter: Tensor | None,
    state_key: str,
    piece: Piece,
    counts_on_device: bool,
) -> Tensor | Slice:
    """Return the optimizer's existing tensor if it fits, else a new one."""
    shape = tuple(piece.shape)
    dtype = piece.data.dtype
    if parameter is None:
        return torch.empty(shape, dtype=dtype)
    # the engine stores state in a custom layout
    if (make_target := getattr(optimizer, "state_room", None)) is not None:
        engine_target: Tensor | Slice = make_target(parameter, state_key, shape, dtype)
        return engine_target
    if state_key:
        live_tensor = optimizer.state.get(parameter, {}).get(state_key)
    else:
        live_tensor = None
    if (
        isinstance(live_tensor, Tensor)
        and tuple(live_tensor.shape) == shape
        and live_tensor.dtype == dtype
    ):
        return live_tensor
    if shape == () and not counts_on_device:
        return torch.empty(shape, dtype=dtype)
    if is_dtensor(parameter) and tuple(parameter.shape) == shape:
        return torch.empty_like(parameter, dtype=dtype, requires_grad=False)
    device = parameter.to_local().device if is_dtensor(parameter) else parameter.device
    return torch.empty(shape, dtype=dtype, device=device)


def _parameter_of(
    tensor_key: str, parameters_by_name: Mapping[str, Tensor]
) -> tuple[Tensor | None, str]:
    """Return the parameter that a stored tensor belongs to, and the key in its state; None for other tensors."""
    if not tensor_key.startswith("state/"):
        return None, ""
    parameter_name, _, state_key = tensor_key.removeprefix("state/").rpartition("/")
    while parameter_name:
        if parameter_name in parameters_by_name:
            return parameters_by_name[
                parameter_name
            ], state_key if "/" not in state_key else ""
        parameter_name, _, last_part = parameter_name.rpartition("/")
        state_key = f"{last_part}/{state_key}"
    return None, ""


# Any: an optimizer's state dict
def _without_other_stages(
    saved_state: dict[str, Any], other_stage_names: frozenset[str]
) -> dict[str, Any]:
    """Return a state dict without the parameters that other pipeline stages hold."""
    if not isinstance(saved_state["param_groups"], list):
        return saved_state
    own_groups = []
    for group in saved_state["param_groups"]:
        own_group = group
        if isinstance(group, dict) and isinstance(group.get("params"), list):
            own_names = [
                name for name in group["params"] if name not in other_stage_names
            ]
            own_group = {**group, "params": own_names}
        own_groups.append(own_group)
    state_by_name = {
        parameter_name: parameter_state
        for parameter_name, parameter_state in saved_state["state"].items()
        if parameter_name not in other_stage_names
    }
    return {**saved_state, "state": state_by_name, "param_groups": own_groups}


# Any: an optimizer's state dict
def _keyed_by_name(
    saved_state: dict[str, Any], flat_names: Sequence[str]
) -> dict[str, Any]:
    """Return a state dict keyed by parameter names, given one keyed by indices as torch's are."""
    saved_groups = saved_state["param_groups"]
    parameter_keys: list[Any] = []
    for group in saved_groups if isinstance(saved_groups, list) else ():
        if isinstance(group, dict) and isinstance(group.get("params"), list):
            parameter_keys += group["params"]
    if not parameter_keys or set(map(type, parameter_keys)) != {int}:
        return saved_state
    return {
        **saved_state,
        "state": {
            _name_of_key(flat_names, parameter_key): parameter_state
            for parameter_key, parameter_state in saved_state["state"].items()
        },
        "param_groups": [
            {
                **group,
                "params": [
                    _name_of_key(flat_names, parameter_key)
                    for parameter_key in group["params"]
                ],
            }
            for group in saved_groups
        ],
    }


def _check_groups(
    component_name: str, saved_groups: Any, names_of_groups: list[list[str]]
) -> None:
    for group in saved_groups if isinstance(saved_groups, list) else [None]:
        if not isinstance(group, dict) or not isinstance(group.get("params"), list):
            raise CorruptCheckpointError(
                f"{component_name}: its parameter groups cannot be read. Nothing was loaded."
            )
    if len(saved_groups) != len(names_of_groups):
        raise CheckpointError(
            f"{component_name}: the checkpoint has {len(saved_groups)} parameter groups, the optimizer {len(names_of_groups)}; their options "
            "would be mixed up. Nothing was loaded. Create the optimizer with the same groups."
        )
    for group_index, (group, group_names) in enumerate(
        zip(saved_groups, names_of_groups, strict=True)
    ):
        missing_names = set(group_names) - set(group["params"])
        extra_names = set(group["params"]) - set(group_names)
        if missing_names or extra_names:
            raise CheckpointError(
                f"{component_name}: parameter group {group_index} lacks {sorted(missing_names)[:4]} and also has {sorted(extra_names)[:4]}. "
                "Nothing was loaded. Create the optimizer over the same parameters in the same groups."
            )
