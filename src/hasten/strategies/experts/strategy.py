"""Transform that shards experts over data-parallel ranks; tokens are sent to the rank that holds their expert."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from hasten.comm.agreement import agree
from hasten.config.sections.parallel import FullyShardedDataParallelPlugin, ParallelismConfig
from hasten.errors import ConfigError, PrepareError, StepError
from hasten.modules import forwarding
from hasten.precision.base import Precision
from hasten.runtime.context import ProcessContext
from hasten.runtime.mesh import WorldMesh
from hasten.runtime.mesh_plan import EXPERTS, MeshSpec
from hasten.strategies.base import PrepareRequest, Stage
from hasten.strategies.experts.ops import route, share
from hasten.strategies.experts.plan import decide
from hasten.strategies.weight_sources import WeightSource, copy_from_rank_0, source_of

log = logging.getLogger(__name__)

_COUNT: Final = "num_experts"
"""Attribute of a module of experts that holds their number."""


class CalledExperts(forwarding.Forward):
    """Forward of a sharded module of experts, called with tokens, their chosen experts and weights."""

    def __init__(self, group: dist.ProcessGroup, num_experts: int) -> None:
        self.group = group
        self.num_experts = num_experts

    def arguments(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor, Tensor]:  # Any: the module's arguments
        """Return hidden states, chosen experts and weights. Raises: StepError for unexpected shapes."""
        given = inspect.signature(self.inner).bind(*args, **kwargs).arguments
        hidden, chosen, weights = list(given.values())[:3]
        if hidden.dim() != 2 or chosen.dim() != 2 or weights.shape != chosen.shape or len(hidden) != len(chosen):
            raise StepError(
                f"{type(self.module).__name__} was called with hidden states {tuple(hidden.shape)}, chosen experts "
                f"{tuple(chosen.shape)} and weights {tuple(weights.shape)}; experts can only be split over ranks with the shapes "
                "[tokens, width], [tokens, k] and [tokens, k]. Call the module with these shapes, or set ep_size=1; under tp_size, name "
                "the "
                "module 'replicate' in tp_plan."
            )
        return hidden, chosen, weights

    def computed(self, rows: Tensor, local: Tensor, weights: Tensor, ranks: int) -> Tensor:
        """Compute this rank's experts for the rows routed to them; gradients of the weights are divided by `ranks`."""
        with self._own_part(ranks) as stacks:
            if len(rows):
                made: Tensor = self.inner(rows, local.unsqueeze(1), weights.unsqueeze(1))
            else:  # so that the weights get gradients, and every rank has the exchanges in its graph
                made = rows + weights.sum() + sum(stack.reshape(-1)[:0].sum() for stack in stacks)
        if made.shape != rows.shape:
            raise StepError(
                f"{type(self.module).__name__} returned shape {tuple(made.shape)} for hidden states of shape "
                f"{tuple(rows.shape)}; experts must return one row per token, with the width of the input. Set ep_size=1, or name the "
                "module 'replicate' in tp_plan."
            )
        return made

    @contextmanager
    def _own_part(self, ranks: int) -> Iterator[list[Tensor]]:
        """Context manager in which the module's parameters are plain tensors: this rank's experts."""
        spread: dict[str, Any] = dict(self.module._parameters)  # Any: parameters, and plain tensors in the meantime
        parts = {name: share(part.to_local(), ranks) for name, part in spread.items() if isinstance(part, DTensor)}
        held: dict[str, Any] = self.module._parameters
        held.update(parts)
        try:
            yield list(parts.values())
        finally:
            held.update(spread)


class Dispatched(CalledExperts):
    """Forward of a module of experts, sharded over ranks: this rank's experts compute the tokens of all ranks."""

    tag = "experts"

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:  # Any: three tensors, by position or name
        hidden, chosen, weights = self.arguments(*args, **kwargs)
        k = chosen.shape[1]
        way = route(chosen.reshape(-1), self.num_experts, self.group)
        rows, theirs = way.there(hidden.repeat_interleave(k, 0)), way.there(weights.reshape(-1))
        made = self.computed(rows, way.local, theirs, self.group.size())
        return way.back(made.to(hidden.dtype)).view(-1, k, hidden.shape[1]).sum(1)


class DivideExperts:
    """Transform that shards the experts of a plan over neighbouring data-parallel ranks; the rest is not changed."""

    stage = Stage.TENSOR

    def __init__(self, config: ParallelismConfig, fsdp: FullyShardedDataParallelPlugin, mesh: WorldMesh) -> None:
        self._config = config
        self._fsdp = fsdp
        self._mesh = mesh

    def apply(self, model: nn.Module, request: PrepareRequest, ctx: ProcessContext, precision: Precision) -> nn.Module:
        if not request.train or expert_groups(model):
            return model
        if precision.spec == "fp8":
            raise ConfigError(
                "mixed_precision='fp8' has not been tested with expert parallelism; use 'bf16', or ep_size=1."
            )
        mesh = self._mesh.experts(ctx)
        _, shards, _ = ctx.mesh.expert_sizes
        with agree(ctx.world, f"splitting the experts of {type(model).__name__}"):
            found = decide(model, self._config.ep_plan, ctx.mesh.ep)
            for name in found:
                _check_shards(name, model.get_submodule(name), ctx.mesh.ep, shards)
        source = source_of(model, self._fsdp, ctx)
        if source is WeightSource.RANK_0:
            raise PrepareError(
                f"only rank 0 built {type(model).__name__} with weights, and sending its experts to the other ranks is not supported. "
                "Build the model with weights on every rank, or on the meta device everywhere."
            )
        copy_from_rank_0(model, ctx)
        ranks = mesh[EXPERTS]
        for name, number in found.items():
            _divide(model.get_submodule(name), number, ranks, ctx.device)
        if ctx.is_main:
            log.info(_account(model, found, ctx.mesh))
        return model

    def undo(self, model: nn.Module) -> nn.Module:
        return model


def expert_groups(model: nn.Module) -> list[nn.Module]:
    """Return the modules whose experts are sharded over ranks."""
    return [module for module in model.modules() if forwarding.find(module, Dispatched.tag) is not None]


def sharded_dim(part: Tensor, shards: int) -> int | None:
    """Return the dimension along which ranks with the same experts shard them: rows if divisible, else experts."""
    sizes = part.to_local().shape if isinstance(part, DTensor) else part.shape
    return next((dim for dim in (1, 0) if sizes[dim] % shards == 0), None)


def _check_shards(name: str, module: nn.Module, ranks: int, shards: int) -> None:
    for part, stack in module.named_parameters():
        if stack.shape[1] % shards and (stack.shape[0] // ranks) % shards:
            raise ConfigError(
                f"'{name}.{part}' has shape {tuple(stack.shape)}: each of {shards} ranks (dp_shard_size / ep_size) would "
                f"hold an uneven shard of its {stack.shape[0] // ranks} experts. Set ep_size to dp_shard_size, so that experts are "
                "split and not sharded."
            )


def _divide(module: nn.Module, number: int, mesh: DeviceMesh, device: torch.device) -> None:
    for name, whole in list(module.named_parameters(recurse=False)):
        part = whole.detach().chunk(mesh.size(), 0)[mesh.get_local_rank()].clone()
        spread = DTensor.from_local(
            part if whole.is_meta else part.to(device),
            mesh,
            [Shard(0)],
            run_check=False,
            shape=whole.shape,
            stride=whole.stride(),
        )
        setattr(module, name, nn.Parameter(spread, requires_grad=whole.requires_grad))
    if getattr(module, _COUNT, None) == number:
        setattr(module, _COUNT, number // mesh.size())
    forwarding.replace(module, Dispatched(mesh.get_group(), number))


def _account(model: nn.Module, found: dict[str, int], mesh: MeshSpec) -> str:
    """Return a summary of the sharded experts and of the bytes on each rank."""
    ranks = mesh.ep
    stacks = [stack for name in found for stack in model.get_submodule(name).parameters()]
    held = sum(stack.numel() * stack.element_size() for stack in stacks)
    numbers = sorted(set(found.values()))
    return (
        f"{type(model).__name__} has {' or '.join(map(str, numbers))} experts in each of {len(found)} modules "
        f"({', '.join(list(found)[:4])}{', ...' if len(found) > 4 else ''}), split over ep {ranks}: each rank holds "
        f"{held / ranks / 2**20:.1f} of {held / 2**20:.1f} MiB of them before sharding"
    )
