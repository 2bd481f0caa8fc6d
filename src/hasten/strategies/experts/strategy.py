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
from hasten.config.sections.parallel import (
    FullyShardedDataParallelPlugin,
    ParallelismConfig,
)
from hasten.errors import ConfigError, PrepareError, StepError
from hasten.modules import forwarding
from hasten.precision.base import Precision
from hasten.runtime.context import ProcessContext
from hasten.runtime.mesh import WorldMesh
from hasten.runtime.mesh_plan import EXPERTS, MeshSpec
from hasten.strategies.base import PrepareRequest, Stage
from hasten.strategies.experts.ops import route_tokens, scale_gradient
from hasten.strategies.experts.plan import decide_experts
from hasten.strategies.weight_sources import WeightSource, copy_from_rank_0, source_of

log = logging.getLogger(__name__)

_COUNT: Final = "num_experts"
"""Attribute of a module of experts that holds their number."""


class CalledExperts(forwarding.Forward):
    """Forward of a sharded module of experts, called with tokens, their chosen experts and weights."""

    def __init__(self, process_group: dist.ProcessGroup, num_experts: int) -> None:
        self.group = process_group
        self.num_experts = num_experts

    # Any: the module's arguments
    def bind_arguments(
        self, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return hidden states, chosen experts and weights. Raises: StepError for unexpected shapes."""
        bound_arguments = inspect.signature(self.inner).bind(*args, **kwargs).arguments
        hidden, chosen_experts, weights = list(bound_arguments.values())[:3]
        if (
            hidden.dim() != 2
            or chosen_experts.dim() != 2
            or weights.shape != chosen_experts.shape
            or len(hidden) != len(chosen_experts)
        ):
            raise StepError(
                f"{type(self.module).__name__} was called with hidden states {tuple(hidden.shape)}, chosen experts "
                f"{tuple(chosen_experts.shape)} and weights {tuple(weights.shape)}; experts can only be split over ranks with the shapes "
                "[tokens, width], [tokens, k] and [tokens, k]. Call the module with these shapes, or set ep_size=1; under tp_size, name "
                "the "
                "module 'replicate' in tp_plan."
            )
        return hidden, chosen_experts, weights

    def compute_experts(
        self, rows: Tensor, local_experts: Tensor, weights: Tensor, num_ranks: int
    ) -> Tensor:
        """Compute this rank's experts for the rows routed to them; gradients of the weights are divided by `ranks`."""
        with self._with_own_experts(num_ranks) as stacks:
            if len(rows):
                outputs: Tensor = self.inner(
                    rows, local_experts.unsqueeze(1), weights.unsqueeze(1)
                )
            # so that the weights get gradients, and every rank has the exchanges in its graph
            else:
                outputs = (
                    rows
                    + weights.sum()
                    + sum(stack.reshape(-1)[:0].sum() for stack in stacks)
                )
        if outputs.shape != rows.shape:
            raise StepError(
                f"{type(self.module).__name__} returned shape {tuple(outputs.shape)} for hidden states of shape "
                f"{tuple(rows.shape)}; experts must return one row per token, with the width of the input. Set ep_size=1, or name the "
                "module 'replicate' in tp_plan."
            )
        return outputs

    @contextmanager
    def _with_own_experts(self, num_ranks: int) -> Iterator[list[Tensor]]:
        """Context manager in which the module's parameters are plain tensors: this rank's experts."""
        sharded_parameters: dict[str, Any] = dict(
            self.module._parameters
        )  # Any: parameters, and plain tensors in the meantime
        local_parts = {}
        for name, parameter in sharded_parameters.items():
            if isinstance(parameter, DTensor):
                local_parts[name] = scale_gradient(parameter.to_local(), num_ranks)
        module_parameters: dict[str, Any] = self.module._parameters
        module_parameters.update(local_parts)
        try:
            yield list(local_parts.values())
        finally:
            module_parameters.update(sharded_parameters)


class Dispatched(CalledExperts):
    """Forward of a module of experts, sharded over ranks: this rank's experts compute the tokens of all ranks."""

    tag = "experts"

    # Any: three tensors, by position or name
    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        hidden, chosen_experts, weights = self.bind_arguments(*args, **kwargs)
        k = chosen_experts.shape[1]
        token_route = route_tokens(
            chosen_experts.reshape(-1), self.num_experts, self.group
        )
        rows = token_route.send_to_experts(hidden.repeat_interleave(k, 0))
        received_weights = token_route.send_to_experts(weights.reshape(-1))
        expert_outputs = self.compute_experts(
            rows, token_route.local, received_weights, self.group.size()
        )
        return (
            token_route.return_to_tokens(expert_outputs.to(hidden.dtype))
            .view(-1, k, hidden.shape[1])
            .sum(1)
        )


class DivideExperts:
    """Transform that shards the experts of a plan over neighbouring data-parallel ranks; the rest is not changed."""

    stage = Stage.TENSOR

    def __init__(
        self,
        parallelism: ParallelismConfig,
        fsdp_config: FullyShardedDataParallelPlugin,
        mesh: WorldMesh,
    ) -> None:
        self._config = parallelism
        self._fsdp = fsdp_config
        self._mesh = mesh

    def apply(
        self,
        model: nn.Module,
        request: PrepareRequest,
        ctx: ProcessContext,
        precision: Precision,
    ) -> nn.Module:
        if not request.train or expert_groups(model):
            return model
        if precision.spec == "fp8":
            raise ConfigError(
                "mixed_precision='fp8' has not been tested with expert parallelism; use 'bf16', or ep_size=1."
            )
        mesh = self._mesh.expert_mesh(ctx)
        _, shards, _ = ctx.mesh.expert_sizes
        with agree(ctx.world, f"splitting the experts of {type(model).__name__}"):
            experts_by_module = decide_experts(model, self._config.ep_plan, ctx.mesh.ep)
            for name in experts_by_module:
                _check_shards(name, model.get_submodule(name), ctx.mesh.ep, shards)
        source = source_of(model, self._fsdp, ctx)
        if source is WeightSource.RANK_0:
            raise PrepareError(
                f"only rank 0 built {type(model).__name__} with weights, and sending its experts to the other ranks is not supported. "
                "Build the model with weights on every rank, or on the meta device everywhere."
            )
        copy_from_rank_0(model, ctx)
        ranks = mesh[EXPERTS]
        for name, number in experts_by_module.items():
            _divide_experts(model.get_submodule(name), number, ranks, ctx.device)
        if ctx.is_main:
            log.info(_describe_experts(model, experts_by_module, ctx.mesh))
        return model

    def undo(self, model: nn.Module) -> nn.Module:
        return model


def expert_groups(model: nn.Module) -> list[nn.Module]:
    """Return the modules whose experts are sharded over ranks."""
    expert_modules = []
    for module in model.modules():
        if forwarding.find(module, Dispatched.tag) is not None:
            expert_modules.append(module)
    return expert_modules


def sharded_dim(stack: Tensor, shards: int) -> int | None:
    """Return the dimension along which ranks with the same experts shard them: rows if divisible, else experts."""
    if isinstance(stack, DTensor):
        shape = stack.to_local().shape
    else:
        shape = stack.shape
    for dim in (1, 0):
        if shape[dim] % shards == 0:
            return dim
    return None


def _check_shards(name: str, module: nn.Module, num_ranks: int, shards: int) -> None:
    for parameter_name, stack in module.named_parameters():
        if stack.shape[1] % shards and (stack.shape[0] // num_ranks) % shards:
            raise ConfigError(
                f"'{name}.{parameter_name}' has shape {tuple(stack.shape)}: each of {shards} ranks (dp_shard_size / ep_size) would "
                f"hold an uneven shard of its {stack.shape[0] // num_ranks} experts. Set ep_size to dp_shard_size, so that experts are "
                "split and not sharded."
            )


def _divide_experts(
    module: nn.Module, num_experts: int, device_mesh: DeviceMesh, device: torch.device
) -> None:
    for parameter_name, whole_parameter in list(module.named_parameters(recurse=False)):
        local_experts = (
            whole_parameter.detach()
            .chunk(device_mesh.size(), 0)[device_mesh.get_local_rank()]
            .clone()
        )
        shard = DTensor.from_local(
            local_experts if whole_parameter.is_meta else local_experts.to(device),
            device_mesh,
            [Shard(0)],
            run_check=False,
            shape=whole_parameter.shape,
            stride=whole_parameter.stride(),
        )
        setattr(
            module,
            parameter_name,
            nn.Parameter(shard, requires_grad=whole_parameter.requires_grad),
        )
    if getattr(module, _COUNT, None) == num_experts:
        setattr(module, _COUNT, num_experts // device_mesh.size())
    forwarding.replace(module, Dispatched(device_mesh.get_group(), num_experts))


def _describe_experts(
    model: nn.Module, experts_by_module: dict[str, int], mesh: MeshSpec
) -> str:
    """Return a summary of the sharded experts and of the bytes on each rank."""
    ranks = mesh.ep
    stacks: list[nn.Parameter] = []
    for name in experts_by_module:
        stacks.extend(model.get_submodule(name).parameters())
    total_bytes = sum(stack.numel() * stack.element_size() for stack in stacks)
    numbers = sorted(set(experts_by_module.values()))
    return (
        f"{type(model).__name__} has {' or '.join(map(str, numbers))} experts in each of {len(experts_by_module)} modules "
        f"({', '.join(list(experts_by_module)[:4])}{', ...' if len(experts_by_module) > 4 else ''}), split over ep {ranks}: each rank holds "
        f"{total_bytes / ranks / 2**20:.1f} of {total_bytes / 2**20:.1f} MiB of them before sharding"
    )
