"""Division of a save over the ranks: which rank writes which slice, and gathering of whole tensors on one rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from hasten.checkpoint.base import Component, Json, Slice, StateTree
from hasten.checkpoint.state_dicts import model_names
from hasten.comm.agreement import Agreement, agreeing
from hasten.comm.base import Comm
from hasten.modules.names import plain_name, stage_part
from hasten.runtime.context import ProcessContext
from hasten.runtime.mesh_plan import AXES, Axis


def owned_by_axes(
    tree: StateTree, is_first: Callable[[tuple[str, ...]], bool]
) -> StateTree:
    """Return the tree with the ownership of sharded pieces decided by `is_first(axes)`: first along all other axes.

    torch may return an equal mesh from an earlier layout of this process, whose other axes are outdated.
    """
    made = {}
    for name, component in tree.components.items():
        tensors = {
            key: replace(value, owned=value.first and is_first(value.axes))
            if isinstance(value, Slice)
            and value.axes
            # excludes meshes of experts and of the user
            and set(value.axes) <= set(AXES)
            else value
            for key, value in component.tensors.items()
        }
        made[name] = replace(component, tensors=tensors)
    return StateTree(made)


def divided(
    tree: StateTree, models: Sequence[nn.Module], ctx: ProcessContext
) -> StateTree:
    """Return the tree with this rank's pipeline stage marked as slices of the whole model. Ranks: every rank."""
    parts = [part for part in map(stage_part, models) if part is not None]
    axes = {axis for part in parts for axis in part.axes} | {Axis.PP}
    if not parts and ctx.mesh.size(Axis.PP) == 1:
        return tree
    first = ctx.mesh.index(ctx.rank, *(axis for axis in Axis if axis not in axes)) == 0
    # another rank may hold the same stage
    writes = first and all(part.first for part in parts)
    stages = ctx.groups(*axes)
    own, copies = _own_names(models)
    made = dict(tree.components)
    for name, component in tree.components.items():
        if component.kind == "model":
            keys = {key for key in component.tensors if f"{name}/{key}" in own}
            made[name] = _as_part(component, keys, writes)
        elif component.kind == "optimizer":
            keys = {key for key in component.tensors if not key.startswith(copies)}
            joined = _merged(stages.all_gather_object(component.data))
            made[name] = replace(_as_part(component, keys, writes), data=joined)
    return StateTree(made)


def _own_names(models: Sequence[nn.Module]) -> tuple[set[str], tuple[str, ...]]:
    """Return the state keys this rank writes, prefixed by model, and prefixes of optimizer state written elsewhere."""
    own: set[str] = set()
    copies: list[str] = []
    for name, prefix, model in model_names(models):
        part = stage_part(model)
        keys = map(plain_name, model.state_dict()) if part is None else part.own_keys
        own |= {f"{name}/{key}" for key in keys}
        copies += (
            [] if part is None else [f"state/{prefix}{copy}/" for copy in part.copies]
        )
    return own, tuple(copies)


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


def _merged(everyone: Sequence[Json]) -> Json:
    """Merge the optimizer state of all stages: the state of every parameter, and groups with all their parameters."""
    first: Any = everyone[0]
    state: dict[str, Any] = {}
    groups = [dict(group) for group in first["param_groups"]]
    for data in everyone:
        other: Any = data
        state |= {
            name: values for name, values in other["state"].items() if name not in state
        }
        for group, more in zip(groups, other["param_groups"], strict=True):
            group["params"] = list(dict.fromkeys([*group["params"], *more["params"]]))
    return {**first, "state": state, "param_groups": groups}


@dataclass(frozen=True, slots=True)
class _Piece:
    """Position of a rank's slice, sent to the other ranks ahead of the data."""

    offset: tuple[int, ...]
    extent: tuple[int, ...]
    owned: bool
    address: int


def gathered(tree: StateTree, comm: Comm, keeps: bool) -> StateTree:
    """Return the tree with sliced tensors gathered whole on ranks with `keeps`; others hold empty placeholders.

    Tensors are gathered one at a time. Ranks: every rank; `keeps` on those that will write.
    """
    made: dict[str, Component] = {}
    with agreeing(comm, "gathering whole tensors") as together:
        for name, component in tree.components.items():
            whole = component.sliced and not component.per_rank
            made[name] = _joined(component, together, keeps) if whole else component
        return StateTree(made)


def _joined(component: Component, together: Agreement, keeps: bool) -> Component:
    positions: list[dict[str, _Piece]] = together.share(
        {
            key: _Piece(
                value.offset,
                tuple(value.data.shape),
                value.owned,
                value.data.data_ptr(),
            )
            for key, value in component.tensors.items()
            if isinstance(value, Slice)
        }
    )
    made: dict[tuple[object, ...], Tensor] = {}
    tensors: dict[str, Tensor | Slice] = {}
    for key, value in component.tensors.items():
        if not isinstance(value, Slice):
            tensors[key] = value
            continue
        pieces = [rank[key] for rank in positions]
        # tied weights stay one tensor under two names
        same = (*value.shape, *(piece.address for piece in pieces))
        if not any(piece.address for piece in pieces) or same not in made:
            made[same] = _assemble(value, pieces, together, keeps)
        tensors[key] = made[same]
    return replace(component, tensors=tensors, main_only=frozenset(tensors))


def _assemble(
    mine: Slice, pieces: list[_Piece], together: Agreement, keeps: bool
) -> Tensor:
    most = max(torch.Size(piece.extent).numel() for piece in pieces)
    flat = mine.data.new_zeros(most)
    flat[: mine.data.numel()] = mine.data.reshape(-1)
    together.share()  # every rank has its piece ready
    parts = together.comm.all_gather(flat)
    if not keeps:
        return torch.zeros((), dtype=mine.data.dtype).expand(mine.shape)
    whole = torch.empty(mine.shape, dtype=mine.data.dtype)
    for piece, part in zip(pieces, parts, strict=True):
        if not piece.owned:
            continue
        target = whole
        for dim, (start, size) in enumerate(
            zip(piece.offset, piece.extent, strict=True)
        ):
            target = target.narrow(dim, start, size)
        target.copy_(part[: target.numel()].reshape(piece.extent))
    return whole


Layout = dict[str, tuple[tuple[int, ...], tuple[int, ...]]]
"""Offset and local shape of every slice, by `component/name`."""


class MachineOwners:
    """Ownership of slices per machine: the first rank that holds a slice owns it.

    The ranks exchange their layouts when one has changed.
    """

    def __init__(self) -> None:
        self._layout: Layout | None = None
        self._owned: frozenset[str] = frozenset()

    def owned(
        self, tree: StateTree, ranks: Sequence[int], together: Agreement
    ) -> StateTree:
        """Return the tree with the `owned` flags set; `ranks` are those of this machine. Ranks: every rank."""
        layout = {
            f"{name}/{key}": (tuple(value.offset), tuple(value.data.shape))
            for name, component in tree.components.items()
            for key, value in component.tensors.items()
            if isinstance(value, Slice)
        }
        if any(together.share(layout != self._layout)):
            layouts: list[Layout] = together.share(layout)
            me = together.comm.ranks[together.comm.rank]
            before = [layouts[rank] for rank in ranks if rank < me]
            self._owned = frozenset(
                key
                for key, at in layout.items()
                if all(other.get(key) != at for other in before)
            )
            self._layout = layout
        return StateTree(
            {
                name: replace(
                    component,
                    tensors={
                        key: replace(value, owned=f"{name}/{key}" in self._owned)
                        if isinstance(value, Slice)
                        else value
                        for key, value in component.tensors.items()
                    },
                )
                for name, component in tree.components.items()
            }
        )
