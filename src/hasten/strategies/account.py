"""Summary of a prepared model: the sharding of each module, and the bytes of the parameters on this rank."""

from __future__ import annotations

import re
from typing import Final

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hasten.modules import forwarding
from hasten.modules.names import local_tensor
from hasten.runtime.bytes_plan import size

_NUMBER: Final = re.compile(r"(?<=\.)\d+(?=\.|$)|^\d+(?=\.|$)")
_MOST_LINES: Final = 32


def memory_line(model: nn.Module) -> str:
    """Return the bytes of the parameters on this rank, and of the whole model (of this rank's stages, under a pipeline)."""
    parameters = list(model.parameters())
    local_bytes = sum(local_tensor(parameter).nbytes for parameter in parameters)
    whole_bytes = sum(
        parameter.numel() * parameter.element_size() for parameter in parameters
    )
    return f"{type(model).__name__}: {size(local_bytes)} of {size(whole_bytes)} of parameters on this rank"


def module_lines(model: nn.Module) -> list[str]:
    """Return a line for each group of similar modules: their name without numbers, their count, and how they are sharded."""
    counts: dict[tuple[str, str, str], int] = {}
    for name, module in model.named_modules():
        parameters = list(module.parameters(recurse=False))
        if parameters:
            pattern = _NUMBER.sub("*", name) or type(model).__name__
            key = pattern, type(module).__name__, _sharding(module, parameters)
            counts[key] = counts.get(key, 0) + 1
    lines = [
        f"{pattern}: {count} x {kind}, {sharding}"
        for (pattern, kind, sharding), count in counts.items()
    ]
    if len(lines) <= _MOST_LINES:
        return lines
    return [*lines[:_MOST_LINES], f"... {len(lines) - _MOST_LINES} more"]


def _sharding(module: nn.Module, parameters: list[nn.Parameter]) -> str:
    """Return the class of a module's replaced forward, and the mesh axes of its parameters."""
    forwards = [
        forward
        for tag in ("tensor", "experts")
        if (forward := forwarding.find(module, tag)) is not None
    ]
    ranks_by_axis = {
        axis: ranks
        for parameter in parameters
        for axis, ranks in _shard_axes(parameter).items()
    }
    axes = " x ".join(f"{axis} {ranks}" for axis, ranks in ranks_by_axis.items())
    words = [type(forward).__name__ for forward in forwards]
    return ", ".join([*words, f"over {axes}" if axes else "replicated on every rank"])


def _shard_axes(parameter: Tensor) -> dict[str, int]:
    """Return the mesh axes that a parameter is sharded over, with their sizes; empty for a replicated parameter."""
    if not isinstance(parameter, DTensor):
        return {}
    mesh = parameter.device_mesh
    return {
        name: mesh.size(axis)
        for axis, (name, placement) in enumerate(
            zip(mesh.mesh_dim_names or (), parameter.placements, strict=True)
        )
        if not placement.is_replicate() and mesh.size(axis) > 1
    }
