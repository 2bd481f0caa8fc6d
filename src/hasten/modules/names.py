"""Canonical names of parameters, independent of wrappers, and groups of tied names."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import filterfalse
from typing import TYPE_CHECKING, Any, Final, TypeGuard

import torch
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from hasten.modules import forwarding
from hasten.optional import need

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


_WRAPPER_PARTS: Final = frozenset(
    {"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"}
)
"""Attributes in which torch's wrappers store the wrapped module; models of users do not have such names."""
_WRAPPER_CLASSES: Final = (DistributedDataParallel, DataParallel)
"""Wrappers that store the module as `module`, a name that a user's model may have as well."""


def plain_name(name: str) -> str:
    """Return `name` without the parts that compile, checkpoint and sharding wrappers add anywhere in it."""
    return ".".join(filterfalse(_WRAPPER_PARTS.__contains__, name.split(".")))


def canonical_name(parameter_name: str, model: nn.Module | None = None) -> str:
    """Return `name` without the parts that wrappers (DDP, compile, checkpointing, FSDP) add.

    With the `model` of the name, `module` is removed exactly where a wrapper added it. Without it, as for a key in
    a file, only leading ones are removed.
    """
    name_parts = parameter_name.split(".")
    if model is None:
        while len(name_parts) > 1 and name_parts[0] in ("module", *_WRAPPER_PARTS):
            name_parts = name_parts[1:]
        return plain_name(".".join(name_parts))
    unwrapped_parts: list[str] = []
    submodule: object = model
    for name_part in name_parts:
        is_wrapper_part = name_part in _WRAPPER_PARTS or (
            name_part == "module" and isinstance(submodule, _WRAPPER_CLASSES)
        )
        if not is_wrapper_part:
            unwrapped_parts.append(name_part)
        submodule = _child(submodule, name_part)
    return ".".join(unwrapped_parts)


def _child(module: object, child_name: str) -> object:
    """Return the submodule `part` without __getattr__, which wrappers forward to the wrapped module."""
    if isinstance(module, nn.Module):
        return module._modules.get(child_name)
    return None


def named_parameters(
    model: nn.Module, *, tied: bool = False
) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the parameters with their canonical names, in the model's order; with `tied`, under all their names."""
    for name, parameter in model.named_parameters(remove_duplicate=not tied):
        yield canonical_name(name, model), parameter


def named_buffers(
    model: nn.Module, *, tied: bool = False
) -> Iterator[tuple[str, Tensor]]:
    """Yield the buffers with their canonical names, in the model's order; with `tied`, under all their names."""
    for name, buffer in model.named_buffers(remove_duplicate=not tied):
        yield canonical_name(name, model), buffer


def tied_groups(model: nn.Module) -> tuple[tuple[str, ...], ...]:
    """Return the groups of canonical names that refer to the same parameter, in the model's order."""
    by_id: dict[int, list[str]] = {}
    for name, parameter in named_parameters(model, tied=True):
        tied_names = by_id.setdefault(id(parameter), [])
        if name not in tied_names:
            tied_names.append(name)
    return tuple(
        tuple(tied_names) for tied_names in by_id.values() if len(tied_names) > 1
    )


TAG = "pipeline"
"""Tag of the forward that runs a pipeline stage."""


@dataclass(frozen=True, slots=True)
class StagePart:
    """Portion of a whole model held by one rank, such as a pipeline stage. Names are those of the whole model."""

    state_keys: tuple[str, ...]
    """Every key of the whole model's state dict, in its order."""
    parameters: frozenset[str]
    """Every parameter of the whole model, a tied one under its first name."""
    own_keys: frozenset[str]
    """State dict keys that this rank writes into checkpoints."""
    ties: tuple[tuple[str, ...], ...] = ()
    """Groups of names of the whole model that refer to one parameter."""
    whole_names: dict[str, str] = field(default_factory=dict)
    """First name in the whole model by name on this rank, for parameters whose first name is on another rank."""
    copies: frozenset[str] = frozenset()
    """Parameters on this rank (by their name in the whole model) that another rank also holds, counts and writes."""

    def whole_name(self, name: str) -> str:
        """Return the first name in the whole model of the parameter called `name` on this rank."""
        return self.whole_names.get(name, name)


def stage_part(model: nn.Module) -> StagePart | None:
    """Return the portion of the whole model that `model` holds; None for a whole model."""
    # split by an engine, not by a forward of hasten
    if (engine_part := model.__dict__.get("stage_part")) is not None:
        stage: StagePart = engine_part
        return stage
    if forwarding.FORWARD not in model.__dict__:
        return None
    forward = forwarding.find(model, TAG)
    forward_part: StagePart | None = getattr(forward, "part", None)
    return forward_part


def is_dtensor(value: object) -> TypeGuard[DTensor]:
    """Return whether `value` is a DTensor."""
    if type(value) is Tensor or type(value) is nn.Parameter:
        return False
    dtensor_class = getattr(
        sys.modules.get("torch.distributed.tensor"), "DTensor", None
    )
    return dtensor_class is not None and isinstance(value, dtensor_class)


def whole_of(value: DTensor) -> Tensor:
    """Return the whole tensor on every rank, gathered along one axis of the mesh after the other. Ranks: the mesh.

    `full_tensor()` gathers in the same steps if a dimension is sharded along several axes, but logs a warning on every rank.
    """
    replicate = placements().Replicate()
    for axis, placement in enumerate(value.placements):
        if placement != replicate:
            new_placements = [
                replicate if mesh_axis == axis else axis_placement
                for mesh_axis, axis_placement in enumerate(value.placements)
            ]
            value = value.redistribute(placements=new_placements)
    return value.to_local()


# Any: DTensor is a Tensor that wraps its local memory
def local_tensor(tensor: Any) -> Tensor:
    """Return the plain memory behind a tensor on this rank."""
    return tensor.to_local() if is_dtensor(tensor) else tensor


def like_parameter(local: Tensor, parameter: Tensor) -> Tensor:
    """Return state of a parameter as the optimizer holds it: a DTensor if the parameter is sharded.

    The local tensor stays where it is; `DTensor.from_local` would move it from the host to the mesh's device.
    """
    if not is_dtensor(parameter) or local.shape != local_tensor(parameter).shape:
        return local
    dtensor: Any = torch.empty_like(
        parameter, dtype=local.dtype, device=local.device, requires_grad=False
    )
    # under autograd, to_local() returns a view, whose memory is not the one to replace
    dtensor._local_tensor.set_(
        local.untyped_storage(), local.storage_offset(), local.shape, local.stride()
    )
    return dtensor  # type: ignore[no-any-return]


def placements() -> Any:  # Any: an untyped module of torch
    """Import and return the module with `DTensor`, `Shard`, `Replicate`, `Partial` and `distribute_tensor`."""
    return need("torch.distributed.tensor")
