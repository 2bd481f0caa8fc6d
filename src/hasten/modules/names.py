"""Names of parameters that stay the same however a model is wrapped, and which names are tied together."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, TypeGuard

from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from hasten.modules import forwarding
from hasten.optional import need
from hasten.runtime.mesh_plan import Axis

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


_WRAPPER_PARTS: Final = frozenset({"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"})
"""Attributes under which torch's wrappers keep the module they wrap; no model of a user has such names."""
_WRAPPER_CLASSES: Final = (DistributedDataParallel, DataParallel)
"""Wrappers that keep the module under `module`, a name that a user's model may have as well."""


def plain_name(name: str) -> str:
    """`name` without the parts that compiling, recomputing and sharding wrappers put into it, wherever they are."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPER_PARTS)


def canonical_name(name: str, model: nn.Module | None = None) -> str:
    """`name` without the parts that wrappers (DDP, compile, checkpointing, FSDP) put into it.

    With the `model` the name belongs to, `module` is dropped exactly where a wrapper put it. Without it, as for a key in
    a file, only leading ones are.
    """
    parts = name.split(".")
    if model is None:
        while len(parts) > 1 and parts[0] in ("module", *_WRAPPER_PARTS):
            parts = parts[1:]
        return plain_name(".".join(parts))
    kept: list[str] = []
    here: object = model
    for part in parts:
        wrapped = part in _WRAPPER_PARTS or (part == "module" and isinstance(here, _WRAPPER_CLASSES))
        if not wrapped:
            kept.append(part)
        here = _child(here, part)
    return ".".join(kept)


def _child(module: object, part: str) -> object:
    """Return the submodule `part` without __getattr__, which wrappers forward to what they wrap."""
    return module._modules.get(part) if isinstance(module, nn.Module) else None


def named_parameters(model: nn.Module, *, tied: bool = False) -> Iterator[tuple[str, nn.Parameter]]:
    """Parameters by canonical name, in the model's order; with `tied`, under every name they have."""
    for name, parameter in model.named_parameters(remove_duplicate=not tied):
        yield canonical_name(name, model), parameter


def named_buffers(model: nn.Module, *, tied: bool = False) -> Iterator[tuple[str, Tensor]]:
    """Buffers by canonical name, in the model's order; with `tied`, under every name they have."""
    for name, buffer in model.named_buffers(remove_duplicate=not tied):
        yield canonical_name(name, model), buffer


def tied_groups(model: nn.Module) -> tuple[tuple[str, ...], ...]:
    """Return the sets of canonical names that are one and the same parameter, each and all in the model's order."""
    by_id: dict[int, list[str]] = {}
    for name, parameter in named_parameters(model, tied=True):
        names = by_id.setdefault(id(parameter), [])
        if name not in names:
            names.append(name)
    return tuple(tuple(names) for names in by_id.values() if len(names) > 1)


TAG = "pipeline"
"""The tag of the forward that runs a stage."""


@dataclass(frozen=True, slots=True)
class StagePart:
    """The part of a whole model that one rank holds. Names are those of the whole model."""

    state_keys: tuple[str, ...]
    """Every key of the whole model's state dict, in its order."""
    parameters: frozenset[str]
    """Every parameter of the whole model, a tied one under its first name."""
    own_keys: frozenset[str]
    """The state this rank writes into checkpoints."""
    ties: tuple[tuple[str, ...], ...] = ()
    """Names of the whole model that are one parameter."""
    whole_names: dict[str, str] = field(default_factory=dict)
    """A parameter's name on this rank to its first name in the whole model, where another rank holds that one."""
    copies: frozenset[str] = frozenset()
    """Parameters here (by their name in the whole model) that another rank holds as well, and counts and writes."""
    axes: frozenset[Axis] = frozenset({Axis.PP})
    """The axes along which ranks hold different parts."""
    first: bool = True
    """No earlier rank along those axes holds the same part."""

    def whole_name(self, name: str) -> str:
        """Return the first name in the whole model of a parameter that has `name` on this rank."""
        return self.whole_names.get(name, name)


def stage_part(model: nn.Module) -> StagePart | None:
    """What the model is a part of; None when it is whole."""
    if (own := model.__dict__.get("stage_part")) is not None:  # cut by an engine, not by a forward of ours
        found: StagePart = own
        return found
    forward = forwarding.find(model, TAG)
    part: StagePart | None = getattr(forward, "part", None)
    return part


def is_dtensor(value: object) -> TypeGuard[DTensor]:
    """Return whether `value` is a DTensor."""
    if type(value) is Tensor or type(value) is nn.Parameter:
        return False
    kind = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)
    return kind is not None and isinstance(value, kind)


def whole_of(value: DTensor) -> Tensor:
    """Return the whole tensor on every rank, gathered along one axis of the mesh after the other. Ranks: the mesh.

    `full_tensor()` gathers in the same steps where a dimension is sharded along several axes, and logs a warning on every rank.
    """
    replicate = placements().Replicate()
    for axis, placement in enumerate(value.placements):
        if placement != replicate:
            lying = [replicate if other == axis else known for other, known in enumerate(value.placements)]
            value = value.redistribute(placements=lying)
    return value.to_local()


def placements() -> Any:  # Any: a module of torch's, typed nowhere
    """The module that holds `DTensor`, `Shard`, `Replicate`, `Partial` and `distribute_tensor`, loaded on first use."""
    return need("torch.distributed.tensor")
