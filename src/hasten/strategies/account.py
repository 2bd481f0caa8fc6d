"""Summary of a prepared model: the sharding of each module, the bytes on this rank, and data-parallel traffic per step."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import SGD, Adam, AdamW, Optimizer

from hasten.config.sections.loop import PrecisionType
from hasten.config.sections.parallel import FullyShardedDataParallelPlugin
from hasten.modules import forwarding
from hasten.modules.names import local_tensor
from hasten.runtime.bytes_plan import Held, Traffic, Weights, data_traffic, held_bytes, shown, size
from hasten.runtime.mesh_plan import EXPERTS, SHARD, Axis, MeshSpec
from hasten.strategies.fsdp.strategy import mixed_precision

_NUMBER: Final = re.compile(r"(?<=\.)\d+(?=\.|$)|^\d+(?=\.|$)")
_SHOWN: Final = 32


@dataclass(frozen=True, slots=True)
class Account:
    """Sharding, memory and traffic of one model on one rank."""

    name: str
    modules: list[str]
    """One line per group of similar modules: their name without numbers, their count, and how they are sharded."""
    whole: int
    """Bytes of the parameters of the whole model (of this rank's stages, under a pipeline)."""
    parameters: int
    """Bytes of the parameters on this rank."""
    planned: Held
    """Estimated bytes on a rank, with gradients and, if its size is known before the first update, the optimizer's state."""
    optimizer: str
    """Class name of the model's optimizer if its state is among the planned bytes; empty otherwise."""
    sent: Traffic
    """Estimated traffic of data parallelism per step."""

    def lines(self) -> list[str]:
        """Return the memory and the traffic as lines of text."""
        state = f"gradients and {self.optimizer}'s state" if self.optimizer else "gradients"
        return [
            f"{self.name}: {size(self.parameters)} of {size(self.whole)} of parameters on this rank (planned "
            f"{size(self.planned.parameters)}), {size(self.planned.total)} with {state}",
            f"{self.name}: data parallelism sends {shown(self.sent)} in a step",
        ]


def account(
    model: nn.Module,
    mesh: MeshSpec,
    config: FullyShardedDataParallelPlugin,
    spec: PrecisionType,
    micro_steps: int,
    optimizers: Sequence[Optimizer] = (),
) -> Account:
    """Return the account of a model that `prepare()` sharded over `mesh` and that one of `optimizers` updates. Local."""
    parameters = list(model.parameters())
    weights = Weights(
        whole=sum(p.numel() for p in parameters if not {str(Axis.TP), EXPERTS} & set(axes_of(p))),
        split=sum(p.numel() for p in parameters if Axis.TP in axes_of(p)),
        experts=sum(p.numel() for p in parameters if EXPERTS in axes_of(p)),
    )
    item = parameters[0].element_size() if parameters else 4
    sharded = any(isinstance(p, DTensor) for p in parameters)
    policy = mixed_precision(config, spec, keep_outputs=False)
    gathered = policy.param_dtype.itemsize if sharded and policy.param_dtype else item
    reduced = policy.reduce_dtype.itemsize if sharded and policy.reduce_dtype else item
    name, moments = _state(parameters, optimizers)
    gathers = 2 if config.reshard_after_forward and mesh.size(*SHARD) > 1 else 1
    return Account(
        name=type(model).__name__,
        modules=_modules(model),
        whole=sum(p.numel() * p.element_size() for p in parameters),
        parameters=sum(local_tensor(p).numel() * p.element_size() for p in parameters),
        planned=held_bytes(mesh, weights, item=item, moments=moments, sharded=sharded),
        optimizer=name,
        sent=data_traffic(mesh, weights, item=gathered, reduce_item=reduced, micro_steps=micro_steps, gathers=gathers),
    )


def _state(parameters: Sequence[Tensor], optimizers: Sequence[Optimizer]) -> tuple[str, int]:
    """Return the optimizer's class name and its number of state tensors per parameter; ("", 0) when unknown."""
    known = {id(parameter) for parameter in parameters}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            if any(id(parameter) in known for parameter in group["params"]):
                moments = _moments(optimizer, group)
                return ("", 0) if moments is None else (type(optimizer).__name__, moments)
    return "", 0


def _moments(optimizer: Optimizer, options: Mapping[str, Any]) -> int | None:  # Any: options of any type
    match optimizer:
        case SGD():
            return int(bool(options.get("momentum")))
        case Adam() | AdamW():
            return 2 + bool(options.get("amsgrad"))
    return None


def axes_of(parameter: Tensor) -> dict[str, int]:
    """Return the mesh axes that a parameter is sharded over, with their sizes; empty for a replicated parameter."""
    if not isinstance(parameter, DTensor):
        return {}
    mesh = parameter.device_mesh
    names = mesh.mesh_dim_names or ()
    return {
        name: mesh.size(dim)
        for dim, (name, placement) in enumerate(zip(names, parameter.placements, strict=True))
        if not placement.is_replicate() and mesh.size(dim) > 1
    }


def _modules(model: nn.Module) -> list[str]:
    alike: dict[tuple[str, str, str], int] = {}
    for name, module in model.named_modules():
        own = list(module.parameters(recurse=False))
        if own:
            key = _NUMBER.sub("*", name) or type(model).__name__, type(module).__name__, _became(module, own)
            alike[key] = alike.get(key, 0) + 1
    lines = [f"{name}: {count} x {kind}, {became}" for (name, kind, became), count in alike.items()]
    left = len(lines) - _SHOWN
    return lines if left <= 0 else [*lines[:_SHOWN], f"... {left} more"]


def _became(module: nn.Module, own: list[nn.Parameter]) -> str:
    """Return a description of a module's sharding: the class of its replaced forward, and the axes of its parameters."""
    replaced = [found for tag in ("tensor", "experts") if (found := forwarding.find(module, tag)) is not None]
    words = [type(found).__name__ for found in replaced]
    divided = {axis: ranks for parameter in own for axis, ranks in axes_of(parameter).items()}
    over = " x ".join(f"{axis} {ranks}" for axis, ranks in divided.items())
    return ", ".join([*words, f"over {over}" if over else "replicated on every rank"])
