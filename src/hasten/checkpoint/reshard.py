"""Reading any slice of a global tensor from pieces written in any other layout."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from hasten.checkpoint.base import Component, Slice, StateTree
from hasten.checkpoint.format.formats import MappedFile, Piece
from hasten.checkpoint.store.disk import is_plain
from hasten.comm.agreement import Agreement, agreeing
from hasten.comm.base import Comm
from hasten.errors import CheckpointError, CorruptCheckpointError
from hasten.modules.names import is_dtensor
from hasten.optional import need
from hasten.runtime.mesh_plan import AXES

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def dtensor_slice(tensor: DTensor) -> Slice:
    """Return the slice of a distributed tensor that this rank holds, with the flag whether this rank writes it.

    Raises: CheckpointError for tensors with partial placements.
    """
    mesh, placements = tensor.device_mesh, tensor.placements
    if any(placement.is_partial() for placement in placements):
        raise CheckpointError(
            f"a tensor with placements {placements} holds partial sums, which are not a state that can be saved; reduce it before saving "
            "(call redistribute with Replicate or Shard)."
        )
    local: Tensor = tensor.to_local()
    layout = need("torch.distributed.tensor._utils")  # already imported wherever a DTensor exists
    shape, offset = layout.compute_local_shape_and_global_offset(tensor.shape, mesh, placements)
    assert tuple(shape) == tuple(local.shape), f"local shape {tuple(local.shape)}, but the layout says {tuple(shape)}"
    coordinate = mesh.get_coordinate()
    assert coordinate is not None, "this rank holds no part of the tensor's mesh"
    first = all(index == 0 for index, p in zip(coordinate, placements, strict=True) if p.is_replicate())
    if local.numel() == 0:  # an empty shard at the end of an uneven split has no offset
        offset = tuple(min(start, total) for start, total in zip(offset, tensor.shape, strict=True))
        first = False
    owned = first and _first_on_other_axes(mesh)
    return Slice(local.detach(), tuple(tensor.shape), tuple(offset), owned, tuple(mesh.mesh_dim_names or ()), first)


def _first_on_other_axes(mesh: DeviceMesh) -> bool:
    """Return True if this rank is the first of those that hold the same tensor on separate submeshes.

    Where layers are split over `tp`, the other parameters are sharded over the data-parallel axes of each `tp` rank
    identically. Pipeline stages (`pp`) hold different parameters.
    """
    root = mesh._get_root_mesh()
    coordinate, names, own = root.get_coordinate(), root.mesh_dim_names, mesh.mesh_dim_names
    if coordinate is None or names is None or own is None:
        return True
    return all(index == 0 for index, name in zip(coordinate, names, strict=True) if name not in (*own, "pp"))


def owned_by_axes(tree: StateTree, is_first: Callable[[tuple[str, ...]], bool]) -> StateTree:
    """Return the tree with the ownership of sharded pieces decided by `is_first(axes)`: first along all other axes.

    torch may return an equal mesh from an earlier layout of this process, whose other axes are outdated.
    """
    made = {}
    for name, component in tree.components.items():
        tensors = {
            key: replace(value, owned=value.first and is_first(value.axes))
            if isinstance(value, Slice)
            and value.axes
            and set(value.axes) <= set(AXES)  # excludes meshes of experts and of the user
            else value
            for key, value in component.tensors.items()
        }
        made[name] = replace(component, tensors=tensors)
    return StateTree(made)


def as_stored(tensor: Tensor) -> Tensor | Slice:
    """Return a tensor in the form that checkpoints store: distributed tensors become slices, others are unchanged."""
    if (own := getattr(tensor, "stored_slice", None)) is not None:  # the engine stores the weights elsewhere
        found: Slice = own(tensor)
        return found
    return dtensor_slice(tensor) if is_dtensor(tensor) else tensor.detach()


@dataclass(frozen=True, slots=True)
class Copy:
    """One copy: a piece of memory to fill, from one piece of a file."""

    target: Tensor
    source: Tensor
    file: MappedFile | None = None

    def place(self) -> int | None:
        """Return the offset of the bytes in the file, if they can be read without conversion."""
        target, source = self.target, self.source
        plain = type(target) is Tensor and is_plain(target) and source.is_contiguous() and target.dtype == source.dtype
        return self.file.place(source) if self.file is not None and plain else None


Region = tuple[tuple[int, int], ...]  # (start, length) per dim


def overlap(offset: Sequence[int], shape: Sequence[int], other: Sequence[int], extent: Sequence[int]) -> Region | None:
    """Return the intersection of two boxes of a global tensor, in global coordinates; None when it is empty."""
    region = []
    for a, n, b, m in zip(offset, shape, other, extent, strict=True):
        start, stop = max(a, b), min(a + n, b + m)
        if start >= stop:
            return None
        region.append((start, stop - start))
    return tuple(region)


def plan_copies(name: str, target: Tensor | Slice, pieces: Sequence[Piece]) -> list[Copy]:
    """Return the copies that fill a live tensor (or a rank's slice of one) from the pieces in a checkpoint.

    Raises: CheckpointError when the shape differs; CorruptCheckpointError when a region is in no file.
    """
    live = target.data if isinstance(target, Slice) else target.detach()
    shape = target.shape if isinstance(target, Slice) else tuple(live.shape)
    offset = target.offset if isinstance(target, Slice) else (0,) * live.dim()
    for piece in pieces:
        if piece.shape != shape:
            raise CheckpointError(
                f"{name} has shape {tuple(shape)} here and {tuple(piece.shape)} in the checkpoint. Nothing was loaded. "
                "Build the model as it was when it was saved, or load with strict=False to leave this tensor out."
            )
    if live.numel() == 0:
        return []
    if live.device.type == "meta":
        raise CheckpointError(
            f"{name} is on the meta device, where there is no memory to load into. Nothing was loaded. Give the model "
            "memory first (prepare it, or call to_empty)."
        )
    if len(pieces) == 1 and pieces[0].data.shape == live.shape == shape:  # the common case, without computing overlaps
        return [Copy(live, pieces[0].data, pieces[0].file)]
    copies, filled = [], 0
    for piece in pieces:
        region = overlap(offset, tuple(live.shape), piece.offset, tuple(piece.data.shape))
        if region is None:
            continue
        copies.append(Copy(_cut(live, region, offset), _cut(piece.data, region, piece.offset), piece.file))
        filled += copies[-1].target.numel()
    if filled != live.numel():
        raise CorruptCheckpointError(
            f"{name}: the files hold {filled} of the {live.numel()} numbers this rank needs, so parts of the tensor are "
            "missing (or stored twice). Nothing was loaded. If machines do not share a disk, copy all rank files "
            "into one folder."
        )
    return copies


def _cut(tensor: Tensor, region: Region, offset: Sequence[int]) -> Tensor:
    for dim, ((start, length), base) in enumerate(zip(region, offset, strict=True)):
        if length != tensor.shape[dim]:
            tensor = tensor.narrow(dim, start - base, length)
    return tensor


def whole(pieces: Sequence[Piece], name: str) -> Tensor:
    """Return the global tensor on the CPU; a view of the mapped file when a single piece covers it."""
    first = pieces[0]
    if len(pieces) == 1 and tuple(first.data.shape) == tuple(first.shape):
        return first.data
    tensor = torch.empty(first.shape, dtype=first.data.dtype)
    for copy in plan_copies(name, tensor, pieces):
        copy.target.copy_(copy.source)
    return tensor


def local_tensor(tensor: Any) -> Tensor:  # Any: DTensor is a Tensor that wraps its local memory
    """Return the plain memory behind a tensor on this rank."""
    return tensor.to_local() if is_dtensor(tensor) else tensor


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
    told: list[dict[str, _Piece]] = together.share(
        {
            key: _Piece(value.offset, tuple(value.data.shape), value.owned, value.data.data_ptr())
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
        pieces = [rank[key] for rank in told]
        same = (*value.shape, *(piece.address for piece in pieces))  # tied weights stay one tensor under two names
        if not any(piece.address for piece in pieces) or same not in made:
            made[same] = _assemble(value, pieces, together, keeps)
        tensors[key] = made[same]
    return replace(component, tensors=tensors, main_only=frozenset(tensors))


def _assemble(mine: Slice, pieces: list[_Piece], together: Agreement, keeps: bool) -> Tensor:
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
        for dim, (start, size) in enumerate(zip(piece.offset, piece.extent, strict=True)):
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

    def owned(self, tree: StateTree, ranks: Sequence[int], together: Agreement) -> StateTree:
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
            self._owned = frozenset(key for key, at in layout.items() if all(other.get(key) != at for other in before))
            self._layout = layout
        return StateTree(
            {
                name: replace(
                    component,
                    tensors={
                        key: replace(value, owned=f"{name}/{key}" in self._owned) if isinstance(value, Slice) else value
                        for key, value in component.tensors.items()
                    },
                )
                for name, component in tree.components.items()
            }
        )
