"""Reading any slice of a global tensor from pieces that any other layout wrote."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from hasten.checkpoint.base import Slice, StateTree
from hasten.checkpoint.format.formats import MappedFile, Piece
from hasten.checkpoint.transfer import is_plain
from hasten.errors import CheckpointError, CorruptCheckpointError
from hasten.modules.dtensors import is_dtensor
from hasten.optional import need
from hasten.runtime.axes import AXES

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def dtensor_slice(tensor: DTensor) -> Slice:
    """The piece of a distributed tensor that this rank holds, and whether this rank is the one to write it.

    Raises: CheckpointError for tensors whose parts still have to be summed.
    """
    mesh, placements = tensor.device_mesh, tensor.placements
    if any(placement.is_partial() for placement in placements):
        raise CheckpointError(
            f"a tensor with placements {placements} holds partial sums, which are not a state that can be saved; reduce it before saving "
            "(call redistribute with Replicate or Shard)."
        )
    local: Tensor = tensor.to_local()
    layout = need("torch.distributed.tensor._utils")  # loaded already, where there is a DTensor
    shape, offset = layout.compute_local_shape_and_global_offset(tensor.shape, mesh, placements)
    assert tuple(shape) == tuple(local.shape), f"local shape {tuple(local.shape)}, but the layout says {tuple(shape)}"
    coordinate = mesh.get_coordinate()
    assert coordinate is not None, "this rank holds no part of the tensor's mesh"
    first = all(index == 0 for index, p in zip(coordinate, placements, strict=True) if p.is_replicate())
    if local.numel() == 0:  # an empty shard at the end of an uneven split has no place of its own
        offset = tuple(min(start, total) for start, total in zip(offset, tensor.shape, strict=True))
        first = False
    owned = first and _first_on_other_axes(mesh)
    return Slice(local.detach(), tuple(tensor.shape), tuple(offset), owned, tuple(mesh.mesh_dim_names or ()), first)


def _first_on_other_axes(mesh: DeviceMesh) -> bool:
    """Whether this rank is the first of those that hold the same tensor on a mesh of their own.

    Where layers are split over `tp`, the parameters beside them are spread over the data-parallel axes of each `tp` rank
    alike. Stages (`pp`) hold different parameters.
    """
    root = mesh._get_root_mesh()
    coordinate, names, own = root.get_coordinate(), root.mesh_dim_names, mesh.mesh_dim_names
    if coordinate is None or names is None or own is None:
        return True
    return all(index == 0 for index, name in zip(coordinate, names, strict=True) if name not in (*own, "pp"))


def owned_by_axes(tree: StateTree, is_first: Callable[[tuple[str, ...]], bool]) -> StateTree:
    """The tree with the owners of pieces that lie on meshes told by `is_first(axes)`: first along all the other axes.

    torch may hand out an equal mesh of an earlier layout of this process, whose other axes are not those of today.
    """
    made = {}
    for name, component in tree.components.items():
        tensors = {
            key: replace(value, owned=value.first and is_first(value.axes))
            if isinstance(value, Slice)
            and value.axes
            and set(value.axes) <= set(AXES)  # no mesh of experts or the user's own
            else value
            for key, value in component.tensors.items()
        }
        made[name] = replace(component, tensors=tensors)
    return StateTree(made)


def as_stored(tensor: Tensor) -> Tensor | Slice:
    """A tensor as checkpoints see it: distributed tensors become slices, others stay."""
    if (own := getattr(tensor, "stored_slice", None)) is not None:  # an engine keeps the weights elsewhere
        found: Slice = own(tensor)
        return found
    return dtensor_slice(tensor) if is_dtensor(tensor) else tensor.detach()


@dataclass(frozen=True, slots=True)
class Copy:
    """One piece of memory to fill, from one piece of a file."""

    target: Tensor
    source: Tensor
    file: MappedFile | None = None

    def place(self) -> int | None:
        """Where in the file the bytes lie, if they can be read from there as they are."""
        target, source = self.target, self.source
        plain = type(target) is Tensor and is_plain(target) and source.is_contiguous() and target.dtype == source.dtype
        return self.file.place(source) if self.file is not None and plain else None


Region = tuple[tuple[int, int], ...]  # (start, length) per dim


def overlap(offset: Sequence[int], shape: Sequence[int], other: Sequence[int], extent: Sequence[int]) -> Region | None:
    """What two boxes of a global tensor share, in global coordinates; None when they do not meet."""
    region = []
    for a, n, b, m in zip(offset, shape, other, extent, strict=True):
        start, stop = max(a, b), min(a + n, b + m)
        if start >= stop:
            return None
        region.append((start, stop - start))
    return tuple(region)


def plan_copies(name: str, target: Tensor | Slice, pieces: Sequence[Piece]) -> list[Copy]:
    """The copies that fill a live tensor (or a rank's slice of one) from the pieces in a checkpoint.

    Raises: CheckpointError when the shape differs; CorruptCheckpointError when a part is in no file.
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
    if len(pieces) == 1 and pieces[0].data.shape == live.shape == shape:  # the common case, without the arithmetic
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
    """The global tensor on the CPU; the mapped file itself when one piece is all of it."""
    first = pieces[0]
    if len(pieces) == 1 and tuple(first.data.shape) == tuple(first.shape):
        return first.data
    tensor = torch.empty(first.shape, dtype=first.data.dtype)
    for copy in plan_copies(name, tensor, pieces):
        copy.target.copy_(copy.source)
    return tensor


def local_tensor(tensor: Any) -> Tensor:  # Any: DTensor is a Tensor whose memory lies one level down
    """The plain memory behind a tensor on this rank."""
    return tensor.to_local() if is_dtensor(tensor) else tensor
