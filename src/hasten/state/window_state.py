"""Gradients of an accumulation window in progress: restored unchanged, or redistributed over another layout."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor, nn

from hasten.checkpoint.base import Component, Json, Slice, as_stored, dtensor_slice
from hasten.checkpoint.format.formats import Piece
from hasten.checkpoint.reader import Checkpoint, FoundComponent
from hasten.checkpoint.reshard import plan_copies
from hasten.errors import CheckpointError
from hasten.modules.names import is_dtensor, local_tensor
from hasten.runtime.logs import get_logger
from hasten.runtime.mesh_plan import LOSS
from hasten.strategies.base import PARTIAL, UNSHARDED

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

log = get_logger(__name__)

_SHARDED: Final = "sharded/"
"""Prefix of gradients that are reduced already, of which each rank holds a slice. Without a prefix: whole and local."""


def gradients_component(
    models: Sequence[nn.Module], names: Mapping[int, str], held: Mapping[str, Tensor], groups: Mapping[str, list[str]]
) -> Component:
    """Return the window's gradients accumulated on this rank; `held` are those of wrapped models besides .grad."""
    grads = {id(p): p.grad for model in models for p in model.parameters() if p.grad is not None}
    return _component(grads, names, held, groups)


def unowned_component(grads: Mapping[int, Tensor], names: Mapping[int, str]) -> Component:
    """Return the gradients, by parameter id, that remain when a window ends, because no optimizer clears them."""
    return _component(grads, names, {}, {})


def _component(
    grads: Mapping[int, Tensor], names: Mapping[int, str], held: Mapping[str, Tensor], groups: Mapping[str, list[str]]
) -> Component:
    found: dict[str, Tensor | Slice] = dict(held)
    for number, grad in grads.items():
        found[(_SHARDED if is_dtensor(grad) else "") + names[number]] = as_stored(grad)
    listed: dict[str, Json] = {first: list(members) for first, members in groups.items()}
    return Component(found, {"groups": listed}, "gradients", per_rank=True)


@dataclass(frozen=True, slots=True)
class GradientLayout:
    """Layout of the loading run, which decides whether saved gradients fit unchanged."""

    rank: int
    world_size: int
    mesh: Mapping[str, int]
    groups: Mapping[str, list[str]]


def loss_ranks(mesh: Mapping[str, int], world_size: int) -> int:
    """Return the number of ranks whose losses are averaged; the other ranks of a mesh compute with the same samples."""
    return math.prod(mesh.get(str(axis), 1) for axis in LOSS) if mesh else world_size


@dataclass(frozen=True, slots=True)
class Gradients:
    """The .grad of each parameter on this rank, by name, and the gradients that wrapped models hold besides."""

    of: dict[str, Tensor] = field(default_factory=dict)
    held: dict[str, Tensor] = field(default_factory=dict)


def plan_gradients(
    checkpoint: Checkpoint,
    models: Sequence[nn.Module],
    names: Mapping[int, str],
    here: GradientLayout,
    *,
    weighted: bool,
    strict: bool,
    component: str = "gradients",
) -> Gradients:
    """Return the gradients of the saved window for this rank. Changes nothing; each rank independently.

    With the layout they were saved from, they are restored bit for bit. With any other, each parameter gets the mean
    over the saving ranks (slices are read unchanged), whose mean over any number of ranks is the same: the update at
    the end of the window equals that of the uninterrupted run, up to the rounding of a mean.
    Raises: CheckpointError when that is impossible.
    """
    live = {names[id(p)]: p for model in models for p in model.parameters()}
    saved_world = checkpoint.manifest.world_size
    _refuse_other_stages(checkpoint.manifest.mesh, here.mesh)
    if checkpoint.same_data(here.world_size, here.mesh):
        mine = checkpoint.component(component, here.rank)
        if _fits(mine, live, checkpoint, here):
            return _as_they_are(mine)
    everyone = [checkpoint.component(component, rank) for rank in range(saved_world)]
    _refuse_unmovable(everyone, here)
    if strict and (strangers := sorted({_plain(key) for found in everyone for key in found.pieces} - live.keys())):
        raise CheckpointError(
            f"{checkpoint.folder}: the accumulation window in progress has gradients of {strangers[:4]}, which no model "
            "here holds. Nothing was loaded. Prepare the models that were saved, or load with strict=False."
        )
    # A weighted window is divided by the number of ranks at its end: preserve the sum over ranks, not the mean.
    saved_ranks = loss_ranks(checkpoint.manifest.mesh, saved_world)
    factor = saved_ranks / loss_ranks(here.mesh, here.world_size) if weighted else 1.0
    moved = ((name, _moved(name, parameter, everyone, strict)) for name, parameter in live.items())
    return Gradients({name: value * factor if factor != 1.0 else value for name, value in moved if value is not None})


def _plain(key: str) -> str:
    for prefix in (_SHARDED, PARTIAL, UNSHARDED):
        key = key.removeprefix(prefix)
    return key


def _as_they_are(mine: FoundComponent) -> Gradients:
    tensors = {key: pieces[0].data.clone() for key, pieces in mine.pieces.items()}
    tensors |= {alias: tensors[key] for alias, key in mine.aliases.items()}
    held = {key: value for key, value in tensors.items() if key.startswith((PARTIAL, UNSHARDED))}
    return Gradients({_plain(key): value for key, value in tensors.items() if key not in held}, held)


def _fits(mine: FoundComponent, live: Mapping[str, Tensor], checkpoint: Checkpoint, here: GradientLayout) -> bool:
    """Return True if this rank's gradients can be restored unchanged."""
    notes: Mapping[str, Any] = mine.data if isinstance(mine.data, dict) else {}
    for key in mine.keys():  # noqa: SIM118 - names of the same tensor count too
        pieces, parameter = mine.of(key) or [], live.get(_plain(key))
        if parameter is None or len(pieces) != 1:
            return False
        shape, sharded = tuple(pieces[0].data.shape), is_dtensor(parameter)
        if key.startswith(PARTIAL):
            same = notes.get("groups") in (None, dict(here.groups)) and dict(checkpoint.manifest.mesh) == dict(
                here.mesh
            )
        elif key.startswith(UNSHARDED):
            same = sharded and shape == tuple(parameter.shape)
        elif key.startswith(_SHARDED):
            same = is_dtensor(parameter) and _same_slice(pieces[0], parameter)
        else:
            same = not sharded and shape == tuple(parameter.shape)
        if not same:
            return False
    return True


def _same_slice(piece: Piece, parameter: DTensor) -> bool:
    own = dtensor_slice(parameter)
    if own.data.numel() == 0:
        return piece.data.numel() == 0
    return (tuple(piece.shape), tuple(piece.offset)) == (own.shape, own.offset) and piece.data.shape == own.data.shape


def _refuse_other_stages(saved: Mapping[str, int], here: Mapping[str, int]) -> None:
    if max(saved.get("pp", 1), here.get("pp", 1)) > 1 and dict(saved) != dict(here):
        raise CheckpointError(
            f"the checkpoint was saved inside an accumulation window with pp_size={saved.get('pp', 1)}, and this run has "
            f"pp_size={here.get('pp', 1)} or another mesh; gradients of a window in progress do not move between pipeline "
            "stages. Nothing was loaded. Resume on the same mesh, or save where a window ends (accelerator.sync_gradients)."
        )


def _refuse_unmovable(everyone: Sequence[FoundComponent], here: GradientLayout) -> None:
    if any(key.startswith(PARTIAL) for found in everyone for key in found.pieces):
        raise CheckpointError(
            f"the checkpoint was saved inside an accumulation window of {len(everyone)} processes that shard and replicate, "
            f"whose gradients are reduced in part and cannot be split over {here.world_size} processes or another "
            f"layout. Nothing was loaded. Resume on {len(everyone)} processes with the same strategy, mesh and wrapping, "
            "or save where a window ends (accelerator.sync_gradients)."
        )


def _moved(name: str, parameter: Tensor, everyone: Sequence[FoundComponent], strict: bool) -> Tensor | None:
    """Return this rank's shard of the mean gradient of one parameter; None when no rank had one."""
    own = as_stored(parameter)
    target = own if isinstance(own, Slice) else Slice(own, tuple(own.shape), (0,) * own.dim())
    reduced = _distinct(piece for found in everyone for piece in found.of(_SHARDED + name) or [])
    local = [pieces for found in everyone for key in (name, UNSHARDED + name) if (pieces := found.of(key))]
    if not reduced and not local:
        return None
    if not strict and any(tuple(piece.shape) != target.shape for piece in (*reduced, *(p for ps in local for p in ps))):
        log.warning("the gradient of %s in the window in progress has another shape and is left out", name)
        return None
    total = _read(name, target, reduced) if reduced else torch.zeros(())
    for pieces in local:
        total = total + _read(name, target, pieces) / len(everyone)
    return total


def _distinct(pieces: Any) -> list[Piece]:  # Any: an iterator of pieces
    """Return the pieces without duplicates of replicas, and without empty ones."""
    found: dict[tuple[int, ...], Piece] = {}
    for piece in pieces:
        if piece.data.numel():
            found.setdefault((*piece.offset, *piece.data.shape), piece)
    return list(found.values())


def _read(name: str, target: Slice, pieces: Sequence[Piece]) -> Tensor:
    """Return the target's slice of a gradient, read from the pieces with it; half precision is summed in float32."""
    dtype = pieces[0].data.dtype
    wide = torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
    part = torch.empty(target.data.shape, dtype=wide)
    for copy in plan_copies(f"gradient of {name}", Slice(part, target.shape, target.offset), pieces):
        copy.target.copy_(copy.source)
    return part


def spread_like(parameter: Tensor, part: Tensor) -> Tensor:
    """Return this rank's shard of a gradient as the gradient of the parameter."""
    if not is_dtensor(parameter):
        return part.to(parameter.device, parameter.dtype, copy=True)
    room = torch.empty_like(parameter, requires_grad=False)
    local_tensor(room).copy_(part)
    return room
