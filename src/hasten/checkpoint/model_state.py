"""Models as components: every parameter and buffer by its canonical name, read back straight into place."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from hasten.checkpoint.base import Component, Format, Json, Slice
from hasten.checkpoint.format.packing import TAG, pack, unpack
from hasten.checkpoint.reader import Found
from hasten.checkpoint.reshard import Copy, as_stored, plan_copies, whole
from hasten.errors import CheckpointError
from hasten.modules.dtensors import is_dtensor
from hasten.modules.names import plain_name
from hasten.modules.stages import stage_part


def model_component(
    model: nn.Module, fmt: Format = "safetensors", weights: Mapping[str, Any] | None = None
) -> Component:
    """The model's state; `weights` in its place when a save hook has edited it."""
    state = dict(model.state_dict(keep_vars=True)) if weights is None else dict(weights)
    tensors = {plain_name(key): as_stored(value) for key, value in state.items() if isinstance(value, Tensor)}
    extra = {plain_name(key): value for key, value in state.items() if not isinstance(value, Tensor)}
    data = None
    if extra and fmt == "torch":  # the file then holds the state dict as it is
        data, tensors = pack({**tensors, **extra})
    elif extra:
        data, more = pack(extra, "extra_state")
        tensors.update(more)
    buffers = {plain_name(name) for name, _ in model.named_buffers(remove_duplicate=False)}
    return Component(tensors, data, "model", fmt, main_only=frozenset(buffers & tensors.keys()))


@dataclass(slots=True)
class LoadReport:
    """Names that did not match, for strict=False."""

    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)


@dataclass(slots=True)
class ModelPlan:
    """What loading a model will do, decided and checked before anything is touched."""

    model: nn.Module
    copies: list[Copy] = field(default_factory=list)
    by_method: dict[str, Any] = field(default_factory=dict)
    report: LoadReport = field(default_factory=LoadReport)

    def finish(self) -> None:
        """Hand over what cannot be copied in place: extra state, and tensors that hooks make up."""
        if self.by_method:
            self.model.load_state_dict(self.by_method, strict=False)


def model_names(models: Sequence[nn.Module]) -> Iterator[tuple[str, str, nn.Module]]:
    """Each model with the name of its component and the prefix of its parameters in optimizer state."""
    for index, model in enumerate(models):
        yield (f"model_{index}", f"model_{index}.", model) if index else ("model", "", model)


def names_of_other_stages(model: nn.Module) -> frozenset[str]:
    """State of the whole model that this rank's pipeline stage does not hold."""
    part = stage_part(model)
    return frozenset() if part is None else frozenset(part.state_keys) - {plain_name(key) for key in model.state_dict()}


def plan_model(model: nn.Module, found: Found, strict: bool = True) -> ModelPlan:
    """Check the model against a checkpoint and plan the copies.

    Raises: CheckpointError naming what is missing, unexpected or of another shape or dtype, when strict.
    """
    plan = ModelPlan(model)
    state = dict(model.state_dict(keep_vars=True))
    live = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
    names = {plain_name(key): key for key in state}
    extra_data = extra_state(found)
    stored = found.keys() - tensor_keys(extra_data)
    extra_names = set(extra_data)
    plan.report.missing = sorted(names.keys() - stored - extra_names)
    plan.report.unexpected = sorted((stored | extra_names) - names.keys() - names_of_other_stages(model))
    if strict and (plan.report.missing or plan.report.unexpected):
        raise CheckpointError(
            f"{found.name}: the checkpoint lacks {_few(plan.report.missing)} and has {_few(plan.report.unexpected)}, "
            "which the model does not. Nothing was loaded. Build the model as it was when it was saved, or load with "
            "strict=False."
        )
    for name in sorted(names.keys() & stored):
        _plan_tensor(plan, found, name, names[name], state[names[name]], live, strict)
    if extra_names & names.keys():
        extra = unpack(extra_data, {key: whole(pieces, key).clone() for key, pieces in found.pieces.items()})
        plan.by_method.update({names[key]: value for key, value in extra.items() if key in names})
    return plan


def extra_state(found: Found) -> dict[str, Json]:
    """What a model's component holds besides plain tensors, packed, by name."""
    data = found.data if isinstance(found.data, dict) else {}
    return {key: value for key, value in data.items() if value != {TAG: "tensor", "key": key}}


def tensor_keys(data: Json) -> set[str]:
    """The keys of all tensors that packed data refers to."""
    if isinstance(data, list):
        return {key for item in data for key in tensor_keys(item)}
    if not isinstance(data, dict):
        return set()
    own = {str(data["key"])} if TAG in data and "key" in data and not isinstance(data["key"], dict) else set()
    return own | {key for item in data.values() for key in tensor_keys(item)}


def _plan_tensor(plan: ModelPlan, found: Found, name: str, key: str, value: Any, live: set[int], strict: bool) -> None:
    pieces = found.of(name)
    assert pieces, f"{name} was found and is gone"
    if id(value) not in live or not isinstance(value, Tensor):
        plan.by_method[key] = whole(pieces, name)
        return
    target = as_stored(value)
    stored_dtype = pieces[0].data.dtype
    if strict and stored_dtype != value.dtype:
        raise CheckpointError(
            f"{found.name}: {name} is {value.dtype} here and {stored_dtype} in the checkpoint; a cast would change its "
            "numbers. Nothing was loaded. Build the model in the dtype it was saved in, or load with strict=False."
        )
    if not strict and tuple(pieces[0].shape) != _shape(target):
        plan.report.skipped.append(name)
        return
    plan.copies += plan_copies(f"{found.name}: {name}", target, pieces)


def _shape(target: Tensor | Slice) -> tuple[int, ...]:
    return tuple(target.shape)


def _few(names: list[str]) -> str:
    if not names:
        return "nothing"
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def empty_like_parameter(parameter: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Room for a state tensor of a parameter: spread like it when it has its shape, else whole on its device."""
    if is_dtensor(parameter) and tuple(parameter.shape) == shape:
        return torch.empty_like(parameter, dtype=dtype, requires_grad=False)
    device = parameter.to_local().device if is_dtensor(parameter) else parameter.device
    return torch.empty(shape, dtype=dtype, device=device)
