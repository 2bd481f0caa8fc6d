"""Models as components: parameters and buffers by canonical name, loaded in place."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hasten.checkpoint.base import Component, Format, Json, Slice, StateTree
from hasten.checkpoint.export import read_model
from hasten.checkpoint.format.packing import TAG, pack, unpack
from hasten.checkpoint.reader import FoundComponent
from hasten.checkpoint.reshard import Copy, as_stored, local_tensor, plan_copies, whole
from hasten.checkpoint.store.locate import check_path
from hasten.comm.base import Comm
from hasten.errors import CheckpointError
from hasten.modules.names import is_dtensor, plain_name, stage_part
from hasten.runtime.context import ProcessContext
from hasten.runtime.mesh_plan import Axis


def model_component(
    model: nn.Module, fmt: Format = "safetensors", weights: Mapping[str, Any] | None = None
) -> Component:
    """Return the model's state as a component; `weights` replace the state when a save hook has edited it."""
    state = dict(model.state_dict(keep_vars=True)) if weights is None else dict(weights)
    tensors = {plain_name(key): as_stored(value) for key, value in state.items() if isinstance(value, Tensor)}
    extra = {plain_name(key): value for key, value in state.items() if not isinstance(value, Tensor)}
    data = None
    if extra and fmt == "torch":  # the file then holds the state dict unchanged
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
    """Copies that load a model, planned and checked before any tensor changes."""

    model: nn.Module
    copies: list[Copy] = field(default_factory=list)
    by_method: dict[str, Any] = field(default_factory=dict)
    report: LoadReport = field(default_factory=LoadReport)

    def finish(self) -> None:
        """Load the state that cannot be copied in place: extra state, and tensors that hooks create."""
        if self.by_method:
            self.model.load_state_dict(self.by_method, strict=False)


def model_names(models: Sequence[nn.Module]) -> Iterator[tuple[str, str, nn.Module]]:
    """Yield each model with the name of its component and the prefix of its parameters in optimizer state."""
    for index, model in enumerate(models):
        yield (f"model_{index}", f"model_{index}.", model) if index else ("model", "", model)


def names_of_other_stages(model: nn.Module) -> frozenset[str]:
    """Return the names of the whole model's state that this rank's pipeline stage does not hold."""
    part = stage_part(model)
    return frozenset() if part is None else frozenset(part.state_keys) - {plain_name(key) for key in model.state_dict()}


def plan_model(model: nn.Module, found: FoundComponent, strict: bool = True) -> ModelPlan:
    """Check the model against a checkpoint and plan the copies.

    Raises: CheckpointError naming missing and unexpected tensors and those of another shape or dtype, when strict.
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


def extra_state(found: FoundComponent) -> dict[str, Json]:
    """Return the packed values of a model's component that are not plain tensors, by name."""
    data = found.data if isinstance(found.data, dict) else {}
    return {key: value for key, value in data.items() if value != {TAG: "tensor", "key": key}}


def tensor_keys(data: Json) -> set[str]:
    """Return the keys of all tensors that packed data refers to."""
    if isinstance(data, list):
        return {key for item in data for key in tensor_keys(item)}
    if not isinstance(data, dict):
        return set()
    own = {str(data["key"])} if TAG in data and "key" in data and not isinstance(data["key"], dict) else set()
    return own | {key for item in data.values() for key in tensor_keys(item)}


def _plan_tensor(
    plan: ModelPlan, found: FoundComponent, name: str, key: str, value: Any, live: set[int], strict: bool
) -> None:
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
    """Return an empty state tensor for a parameter: sharded like it if the shapes match, else whole on its device."""
    if is_dtensor(parameter) and tuple(parameter.shape) == shape:
        return torch.empty_like(parameter, dtype=dtype, requires_grad=False)
    device = parameter.to_local().device if is_dtensor(parameter) else parameter.device
    return torch.empty(shape, dtype=dtype, device=device)


def divided(tree: StateTree, models: Sequence[nn.Module], ctx: ProcessContext) -> StateTree:
    """Return the tree with this rank's pipeline stage marked as slices of the whole model. Ranks: every rank."""
    parts = [part for part in map(stage_part, models) if part is not None]
    axes = {axis for part in parts for axis in part.axes} | {Axis.PP}
    if not parts and ctx.mesh.size(Axis.PP) == 1:
        return tree
    first = ctx.mesh.index(ctx.rank, *(axis for axis in Axis if axis not in axes)) == 0
    return _over_stages(tree, models, ctx.groups(*axes), first and all(part.first for part in parts))


def _over_stages(tree: StateTree, models: Sequence[nn.Module], stages: Comm, writes: bool) -> StateTree:
    """Return the tree with this rank's share of models and optimizers marked as slices of the whole.

    `stages` are the ranks that hold the other stages; `writes` is False where another rank holds the same stage.
    Ranks: every rank.
    """
    own, copies = _own_names(models)
    made = dict(tree.components)
    for name, component in tree.components.items():
        if component.kind == "model":
            keys = {key for key in component.tensors if f"{name}/{key}" in own}
            made[name] = _as_part(component, keys, writes)
        elif component.kind == "optimizer":
            keys = {key for key in component.tensors if not _of_a_copy(key, copies)}
            joined = _joined(stages.all_gather_object(component.data))
            made[name] = replace(_as_part(component, keys, writes), data=joined)
    return StateTree(made)


def _own_names(models: Sequence[nn.Module]) -> tuple[set[str], list[str]]:
    """Return the state keys this rank writes, prefixed by model, and prefixes of optimizer state written elsewhere."""
    own: set[str] = set()
    copies: list[str] = []
    for name, prefix, model in model_names(models):
        part = stage_part(model)
        keys = map(plain_name, model.state_dict()) if part is None else part.own_keys
        own |= {f"{name}/{key}" for key in keys}
        copies += [] if part is None else [f"state/{prefix}{copy}/" for copy in part.copies]
    return own, copies


def _of_a_copy(key: str, copies: Sequence[str]) -> bool:
    return any(key.startswith(prefix) for prefix in copies)


def _as_part(component: Component, own: set[str], writes: bool) -> Component:
    """Return the component with whole tensors as slices, so that each rank's file holds the tensors it owns."""
    tensors: dict[str, Tensor | Slice] = {}
    for key, value in component.tensors.items():
        if isinstance(value, Slice):
            tensors[key] = replace(value, owned=value.owned and key in own)
        else:
            shape = tuple(value.shape)
            tensors[key] = Slice(value, shape, (0,) * len(shape), writes and key in own)
    return replace(component, tensors=tensors, main_only=frozenset())


def _joined(everyone: Sequence[Json]) -> Json:
    """Merge the optimizer state of all stages: the state of every parameter, and groups with all their parameters."""
    first: Any = everyone[0]
    state: dict[str, Any] = {}
    groups = [dict(group) for group in first["param_groups"]]
    for data in everyone:
        other: Any = data
        state |= {name: values for name, values in other["state"].items() if name not in state}
        for group, more in zip(groups, other["param_groups"], strict=True):
            group["params"] = list(dict.fromkeys([*group["params"], *more["params"]]))
    return {**first, "state": state, "param_groups": groups}


def names_elsewhere(models: Sequence[nn.Module], here: Mapping[int, str]) -> frozenset[str]:
    """Return the checkpoint names of the parameters that only other pipeline stages hold."""
    found: set[str] = set()
    for _, prefix, model in model_names(models):
        part = stage_part(model)
        found |= set() if part is None else {prefix + name for name in part.parameters}
    return frozenset(found - set(here.values()))


def load_weights(model: nn.Module, folder: str | Path, strict: bool = True, allow_pickle: bool = False) -> LoadReport:
    """Load the model from a Hub-layout folder or a single file; return the names that did not match, if not strict.

    Sharded parameters read only their slice of the mapped file, so host memory stays near model size / world size.
    Everything is checked before any tensor changes. Ranks: every rank that holds a shard of the model.
    Raises: CheckpointError naming missing and unexpected tensors and those of another shape.
    """
    check_path(folder, "load_model(directory)")
    stored = read_model(folder, allow_pickle)
    live = {
        plain_name(name): tensor
        for name, tensor in model.state_dict(keep_vars=True).items()
        if isinstance(tensor, Tensor)
    }
    report = LoadReport(
        missing=sorted(live.keys() - stored.keys()),
        unexpected=sorted(stored.keys() - live.keys() - names_of_other_stages(model)),
    )
    if strict and (report.missing or report.unexpected):
        raise CheckpointError(
            f"{folder}: the files lack {_few(report.missing)} and have {_few(report.unexpected)}, which the model does "
            "not. Nothing was loaded. Give the files of this model, or load with strict=False."
        )
    both = sorted(live.keys() & stored.keys())
    wrong = [name for name in both if live[name].shape != stored[name].shape]
    if wrong:
        name = wrong[0]
        raise CheckpointError(
            f"{folder}: {name} is {tuple(stored[name].shape)} in the files and {tuple(live[name].shape)} in the model"
            f"{f', and {len(wrong) - 1} more differ' if len(wrong) > 1 else ''}. Nothing was loaded."
        )
    with torch.no_grad():
        for name in both:
            _fill(live[name], stored[name])
    return report


def _fill(target: Tensor, source: Tensor) -> None:
    """Copy a mapped tensor, or this rank's slice of it, into the target."""
    piece = as_stored(target)
    if isinstance(piece, Slice):
        for dim, (start, size) in enumerate(zip(piece.offset, piece.data.shape, strict=True)):
            source = source.narrow(dim, start, size)
        piece.data.copy_(source)
        return
    local_tensor(target).copy_(source)
