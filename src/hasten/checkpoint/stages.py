"""Checkpoints of models that are divided by names (stages, experts): every rank writes what it holds, and the table of contents names everything."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from hasten.checkpoint.base import Component, Json, Slice, StateTree
from hasten.checkpoint.model_state import model_names
from hasten.comm.base import Comm
from hasten.modules.names import plain_name
from hasten.modules.stages import stage_part
from hasten.runtime.axes import Axis
from hasten.runtime.context import ProcessContext


def divided(tree: StateTree, models: Sequence[nn.Module], ctx: ProcessContext) -> StateTree:
    """The tree with what is one rank's part of a model marked as a part of the whole. Ranks: every rank."""
    parts = [part for part in map(stage_part, models) if part is not None]
    axes = {axis for part in parts for axis in part.axes} | {Axis.PP}
    if not parts and ctx.mesh.size(Axis.PP) == 1:
        return tree
    first = ctx.mesh.index(ctx.rank, *(axis for axis in Axis if axis not in axes)) == 0
    return _over_stages(tree, models, ctx.groups(*axes), first and all(part.first for part in parts))


def _over_stages(tree: StateTree, models: Sequence[nn.Module], stages: Comm, writes: bool) -> StateTree:
    """The tree with this rank's part of models and optimizers marked as a part of the whole.

    `stages` are the ranks that hold the other stages; `writes` is false where another rank holds the same stage.
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
    """The state this rank writes, led by its model's name, and the prefixes of optimizer state that another writes."""
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
    """The component with whole tensors as slices, so that each rank's file holds what it owns."""
    tensors: dict[str, Tensor | Slice] = {}
    for key, value in component.tensors.items():
        if isinstance(value, Slice):
            tensors[key] = replace(value, owned=value.owned and key in own)
        else:
            shape = tuple(value.shape)
            tensors[key] = Slice(value, shape, (0,) * len(shape), writes and key in own)
    return replace(component, tensors=tensors, main_only=frozenset())


def _joined(everyone: Sequence[Json]) -> Json:
    """The optimizers of all stages as one: the state of every parameter, groups with all their members."""
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
    """The parameters that only other pipeline stages hold, by the names that checkpoints use."""
    found: set[str] = set()
    for _, prefix, model in model_names(models):
        part = stage_part(model)
        found |= set() if part is None else {prefix + name for name in part.parameters}
    return frozenset(found - set(here.values()))
