"""Division of a save over the ranks: which rank writes which slice, and gathering of whole tensors on one rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from torch import Tensor, nn

from hasten.checkpoint.base import Component, Json, Slice, StateTree
from hasten.checkpoint.state_dicts import model_names
from hasten.comm.agreement import Agreement, agreeing
from hasten.comm.base import Comm
from hasten.modules.names import plain_name, stage_part
from hasten.runtime.context import ProcessContext
from hasten.runtime.mesh_plan import AXES, Axis

_AXES: Final = frozenset(AXES)


def owned_by_axes(
    tree: StateTree, is_first: Callable[[tuple[str, ...]], bool]
) -> StateTree:
    """Return the tree with the ownership of sharded pieces decided by `is_first(axes)`: first along all other axes.

    torch may return an equal mesh from an earlier layout of this process, whose other axes are outdated.
    """
    owned_components = {}
    for component_name, component in tree.components.items():
        tensors = dict(component.tensors)
        for tensor_name, tensor in component.tensors.items():
            # excludes meshes of experts and of the user
            if isinstance(tensor, Slice) and tensor.axes and set(tensor.axes) <= _AXES:
                is_owned = tensor.first and is_first(tensor.axes)
                tensors[tensor_name] = replace(tensor, owned=is_owned)
        owned_components[component_name] = replace(component, tensors=tensors)
    return StateTree(owned_components)


def divide_stages(
    tree: StateTree, models: Sequence[nn.Module], ctx: ProcessContext
) -> StateTree:
    """Return the tree with this rank's pipeline stage marked as slices of the whole model. Ranks: every rank."""
    has_stages = any(stage_part(model) is not None for model in models)
    if not has_stages and ctx.mesh.size(Axis.PP) == 1:
        return tree
    other_axes = [axis for axis in Axis if axis is not Axis.PP]
    # other ranks may hold the same stage
    is_writer = ctx.mesh.index(ctx.rank, *other_axes) == 0
    stages_comm = ctx.groups(Axis.PP)
    owned_keys, copied_prefixes = _names_of_stages(models)
    divided_components = dict(tree.components)
    for component_name, component in tree.components.items():
        if component.kind == "model":
            component_keys = {
                tensor_name
                for tensor_name in component.tensors
                if f"{component_name}/{tensor_name}" in owned_keys
            }
            divided_components[component_name] = _as_slices(
                component, component_keys, is_writer
            )
        elif component.kind == "optimizer":
            component_keys = {
                tensor_name
                for tensor_name in component.tensors
                if not tensor_name.startswith(copied_prefixes)
            }
            merged_state = _merge_optimizer_states(
                stages_comm.all_gather_object(component.data)
            )
            divided_components[component_name] = replace(
                _as_slices(component, component_keys, is_writer), data=merged_state
            )
    return StateTree(divided_components)


def _names_of_stages(models: Sequence[nn.Module]) -> tuple[set[str], tuple[str, ...]]:
    """Return the state keys this rank writes, prefixed by model, and prefixes of optimizer state written elsewhere."""
    owned_keys: set[str] = set()
    copied_prefixes: list[str] = []
    for component_name, prefix, model in model_names(models):
        stage = stage_part(model)
        if stage is None:
            state_keys = frozenset(map(plain_name, model.state_dict()))
        else:
            state_keys = stage.own_keys
            copied_prefixes += [f"state/{prefix}{copy}/" for copy in stage.copies]
        owned_keys |= {f"{component_name}/{state_key}" for state_key in state_keys}
    return owned_keys, tuple(copied_prefixes)


def _as_slices(
    component: Component, owned_keys: set[str], is_writer: bool
) -> Component:
    """Return the component with whole tensors as slices, so that each rank's file holds the tensors it owns."""
    tensors: dict[str, Tensor | Slice] = {}
    for tensor_name, tensor in component.tensors.items():
        if isinstance(tensor, Slice):
            tensors[tensor_name] = replace(
                tensor, owned=tensor.owned and tensor_name in owned_keys
            )
        else:
            shape = tuple(tensor.shape)
            tensors[tensor_name] = Slice(
                tensor,
                shape,
                (0,) * len(shape),
                is_writer and tensor_name in owned_keys,
            )
    return replace(component, tensors=tensors, main_only=frozenset())


def _merge_optimizer_states(states_of_stages: Sequence[Json]) -> Json:
    """Merge the optimizer state of all stages: the state of every parameter, and groups with all their parameters."""
    first_state: Any = states_of_stages[0]
    merged_state: dict[str, Any] = {}
    merged_groups = [dict(group) for group in first_state["param_groups"]]
    for packed_state in states_of_stages:
        stage_state: Any = packed_state
        merged_state |= {
            parameter_name: parameter_state
            for parameter_name, parameter_state in stage_state["state"].items()
            if parameter_name not in merged_state
        }
        for group, stage_group in zip(
            merged_groups, stage_state["param_groups"], strict=True
        ):
            group["params"] = list(
                dict.fromkeys([*group["params"], *stage_group["params"]])
            )
    return {**first_state, "state": merged_state, "param_groups": merged_groups}


@dataclass(frozen=True, slots=True)
class _PiecePosition:
    """Position of a rank's slice, sent to the other ranks ahead of the data."""

    offset: tuple[int, ...]
    extent: tuple[int, ...]
    owned: bool
    address: int


def gather_slices(tree: StateTree, comm: Comm, keeps: bool) -> StateTree:
    """Return the tree with sliced tensors gathered whole on ranks with `keeps`; others hold empty placeholders.

    Tensors are gathered one at a time. Ranks: every rank; `keeps` on those that will write.
    """
    gathered_components: dict[str, Component] = {}
    with agreeing(comm, "gathering whole tensors") as agreement:
        for component_name, component in tree.components.items():
            is_gathered = component.sliced and not component.per_rank
            gathered_components[component_name] = (
                _gather_component(component, agreement, keeps)
                if is_gathered
                else component
            )
        return StateTree(gathered_components)


def _gather_component(
    component: Component, agreement: Agreement, keeps: bool
) -> Component:
    positions_of_ranks: list[dict[str, _PiecePosition]] = agreement.share(
        {
            tensor_name: _PiecePosition(
                tensor.offset,
                tuple(tensor.data.shape),
                tensor.owned,
                tensor.data.data_ptr(),
            )
            for tensor_name, tensor in component.tensors.items()
            if isinstance(tensor, Slice)
        }
    )
    gathered_tensors: dict[tuple[object, ...], Tensor] = {}
    tensors: dict[str, Tensor | Slice] = {}
    for tensor_name, tensor in component.tensors.items():
        if not isinstance(tensor, Slice):
            tensors[tensor_name] = tensor
            continue
        pieces = [rank_positions[tensor_name] for rank_positions in positions_of_ranks]
        # tied weights stay one tensor under two names
        memory_key = (*tensor.shape, *(piece.address for piece in pieces))
        if (
            not any(piece.address for piece in pieces)
            or memory_key not in gathered_tensors
        ):
            gathered_tensors[memory_key] = _assemble_tensor(
                tensor, pieces, agreement, keeps
            )
        tensors[tensor_name] = gathered_tensors[memory_key]
    return replace(component, tensors=tensors, main_only=frozenset(tensors))


def _assemble_tensor(
    local_slice: Slice, pieces: list[_PiecePosition], agreement: Agreement, keeps: bool
) -> Tensor:
    max_numel = max(torch.Size(piece.extent).numel() for piece in pieces)
    flat_piece = local_slice.data.new_zeros(max_numel)
    flat_piece[: local_slice.data.numel()] = local_slice.data.reshape(-1)
    agreement.share()  # every rank has its piece ready
    flat_pieces = agreement.comm.all_gather(flat_piece)
    if not keeps:
        return torch.zeros((), dtype=local_slice.data.dtype).expand(local_slice.shape)
    global_tensor = torch.empty(local_slice.shape, dtype=local_slice.data.dtype)
    for piece, gathered_piece in zip(pieces, flat_pieces, strict=True):
        if not piece.owned:
            continue
        target = global_tensor
        for dim, (start, size) in enumerate(
            zip(piece.offset, piece.extent, strict=True)
        ):
            target = target.narrow(dim, start, size)
        target.copy_(gathered_piece[: target.numel()].reshape(piece.extent))
    return global_tensor


SliceLayout = dict[str, tuple[tuple[int, ...], tuple[int, ...]]]
"""Offset and local shape of every slice, by `component/name`."""


@dataclass(slots=True)
class MachineOwners:
    """Ownership of slices per machine: the first rank that holds a slice owns it.

    The ranks exchange their layouts when one has changed.
    """

    _layout: SliceLayout | None = None
    _owned: frozenset[str] = frozenset()

    def owned(
        self, tree: StateTree, machine_ranks: Sequence[int], agreement: Agreement
    ) -> StateTree:
        """Return the tree with the `owned` flags set; `ranks` are those of this machine. Ranks: every rank."""
        slice_layout = {
            f"{component_name}/{tensor_name}": (
                tuple(tensor.offset),
                tuple(tensor.data.shape),
            )
            for component_name, component in tree.components.items()
            for tensor_name, tensor in component.tensors.items()
            if isinstance(tensor, Slice)
        }
        if any(agreement.share(slice_layout != self._layout)):
            layouts_of_ranks: list[SliceLayout] = agreement.share(slice_layout)
            own_rank = agreement.comm.ranks[agreement.comm.rank]
            earlier_layouts = [
                layouts_of_ranks[rank] for rank in machine_ranks if rank < own_rank
            ]
            self._owned = frozenset(
                tensor_name
                for tensor_name, position in slice_layout.items()
                if all(
                    earlier_layout.get(tensor_name) != position
                    for earlier_layout in earlier_layouts
                )
            )
            self._layout = slice_layout
        owned_components = {}
        for component_name, component in tree.components.items():
            tensors = dict(component.tensors)
            for tensor_name, tensor in component.tensors.items():
                if isinstance(tensor, Slice):
                    is_owned = f"{component_name}/{tensor_name}" in self._owned
                    tensors[tensor_name] = replace(tensor, owned=is_owned)
            owned_components[component_name] = replace(component, tensors=tensors)
        return StateTree(owned_components)
