"""The transform that shards a model over processes: torch's fully_shard, for any module and any number of models."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor

from hasten.config.precision import PrecisionType
from hasten.config.sharding import FullyShardedDataParallelPlugin
from hasten.errors import PrepareError, StepError
from hasten.precision.base import Precision
from hasten.runtime.axes import SHARD, Axis
from hasten.runtime.context import ProcessContext
from hasten.runtime.mesh import device_mesh
from hasten.strategies.base import Stage, Wish
from hasten.strategies.wrapping import blocks_to_shard, ignored_parameters

log = logging.getLogger(__name__)

_DTYPES: Final = (("fp32", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16))


class Shard:
    """Shards parameters, gradients and optimizer state over the shard axis; replicates over the replicate axis."""

    stage = Stage.SPREAD

    def __init__(self, config: FullyShardedDataParallelPlugin, keep_outputs: bool = False) -> None:
        self._config = config
        self._keep_outputs = keep_outputs
        self._mesh: DeviceMesh | None = None
        self._replicated = False
        self._is_main = True

    def apply(self, model: nn.Module, wish: Wish, ctx: ProcessContext, precision: Precision) -> nn.Module:
        if isinstance(model, FSDPModule) or not wish.train:
            return model
        mesh = self._mesh_for(ctx)
        policy = mixed_precision(self._config, precision.spec, self._keep_outputs)
        ignored = ignored_parameters(model, self._config)
        blocks = blocks_to_shard(model, self._config)
        _upcast_trainable(model, precision.spec, ignored)
        if self._config.sync_module_states:
            _from_rank_0(model, ctx)
        inside = replace(policy, output_dtype=None)  # between blocks activations stay in the computing dtype
        options: dict[str, Any] = {  # Any: keywords of fully_shard
            "mesh": mesh,
            "offload_policy": self._offload(ctx),
            "ignored_params": ignored,
        }
        after = self._config.reshard_after_forward
        for block in blocks:
            fully_shard(block, reshard_after_forward=after, mp_policy=inside, **options)
        fully_shard(model, reshard_after_forward=after, mp_policy=policy, **options)
        self._prefetch(blocks)
        _materialise(model, self._config, ctx)
        _keep_rest_on_device(model, ctx, self._config)
        log.info(_banner(model, mesh, policy, self._config))
        return model

    def undo(self, model: nn.Module) -> nn.Module:
        return model

    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        """Gradients stay sharded: shards are reduced in every micro-step, replicas only where the window ends."""
        if not self._replicated or not isinstance(model, FSDPModule):
            return nullcontext()
        return _without_all_reduce(model)

    def full_state_dict(self, model: nn.Module) -> dict[str, Any]:  # Any: tensors and extra state
        """Whole tensors in host memory on the main process; an empty dict elsewhere. Ranks: every rank."""
        full: dict[str, Any] = {}
        for name, value in model.state_dict().items():
            whole = value.full_tensor() if isinstance(value, DTensor) else value
            if self._is_main:
                full[name] = whole.cpu() if isinstance(whole, Tensor) else whole
        return full

    def mark_forward_method(self, model: nn.Module, name: str) -> None:
        if not callable(getattr(model, name, None)):
            raise PrepareError(f"{type(model).__name__} has no method {name!r} to mark; check the spelling.")
        register_fsdp_forward_method(model, name)

    def join(self, models: list[nn.Module]) -> AbstractContextManager[None]:
        raise StepError(
            "join_uneven_inputs() is not possible under fsdp: every rank must take part in every gather of "
            "parameters. Use even_batches=True (the default), which gives every rank the same number of batches."
        )

    def _mesh_for(self, ctx: ProcessContext) -> DeviceMesh:
        if self._mesh is None:
            whole = device_mesh(ctx.mesh, ctx.device)
            self._is_main = ctx.is_main
            self._replicated = ctx.mesh.size(Axis.DP_REPLICATE) > 1
            assert ctx.mesh.size(*SHARD) == ctx.mesh.size(Axis.DP_SHARD), "context parallel shards join later"
            names = (Axis.DP_REPLICATE, Axis.DP_SHARD) if self._replicated else (Axis.DP_SHARD,)
            self._mesh = whole[tuple(str(name) for name in names)]
        return self._mesh

    def _offload(self, ctx: ProcessContext) -> OffloadPolicy:
        if not self._config.cpu_offload:
            return OffloadPolicy()
        pin = self._config.cpu_offload_pin_memory and ctx.device.type != "cpu"
        return CPUOffloadPolicy(pin_memory=pin)

    def _prefetch(self, blocks: Sequence[nn.Module]) -> None:
        ahead, behind = self._config.forward_prefetch_depth, self._config.backward_prefetch_depth
        sharded: list[FSDPModule] = [block for block in blocks if isinstance(block, FSDPModule)]
        for index, block in enumerate(sharded):
            if ahead:
                block.set_modules_to_forward_prefetch(sharded[index + 1 : index + 1 + ahead])
            if behind:
                block.set_modules_to_backward_prefetch(sharded[max(0, index - behind) : index][::-1])


@contextmanager
def _without_all_reduce(model: FSDPModule) -> Iterator[None]:
    model.set_requires_all_reduce(False)
    try:
        yield
    finally:
        model.set_requires_all_reduce(True)


def mixed_precision(
    config: FullyShardedDataParallelPlugin, spec: PrecisionType, keep_outputs: bool
) -> MixedPrecisionPolicy:
    """The dtypes of gathered parameters, of the reduction and of outputs."""
    if isinstance(config.mixed_precision_policy, MixedPrecisionPolicy):
        return config.mixed_precision_policy
    asked = config.dtypes
    names = dict(_DTYPES)
    half = {"bf16": torch.bfloat16, "fp8": torch.bfloat16, "fp16": torch.float16}.get(spec)
    output = None if half is None or keep_outputs else torch.float32
    return MixedPrecisionPolicy(
        param_dtype=names[asked.param_dtype] if asked.param_dtype else half,
        reduce_dtype=names[asked.reduce_dtype] if asked.reduce_dtype else (torch.float32 if half else None),
        output_dtype=names[asked.output_dtype] if asked.output_dtype else output,
        cast_forward_inputs=asked.cast_forward_inputs,
    )


def _upcast_trainable(model: nn.Module, spec: PrecisionType, ignored: set[nn.Parameter]) -> None:
    """Give trainable half-precision parameters float32 master weights under mixed precision; frozen ones stay."""
    if spec == "no":
        return
    for parameter in model.parameters():
        if parameter.requires_grad and parameter.dtype in (torch.float16, torch.bfloat16) and parameter not in ignored:
            parameter.data = parameter.data.float()


def _from_rank_0(model: nn.Module, ctx: ProcessContext) -> None:
    """Make parameters and buffers those of rank 0, so that every rank cuts its shard from the same model."""
    if ctx.world.size == 1:
        return
    for tensor in (*model.parameters(), *model.buffers()):
        if not tensor.is_meta:
            tensor.data.copy_(ctx.world.broadcast(tensor.data))


def _materialise(model: nn.Module, config: FullyShardedDataParallelPlugin, ctx: ProcessContext) -> None:
    """Give meta parameters storage for this rank's shards, and fill them when the user says how."""
    if not any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers())):
        return
    where = torch.device("cpu") if config.cpu_offload else ctx.device
    buffers = {name for name, buffer in model.named_buffers() if buffer.is_meta} - set(model.state_dict())
    model.to_empty(device=where)
    if config.param_init_fn is not None:
        for module in model.modules():
            config.param_init_fn(module)
        return
    if buffers:
        raise PrepareError(
            f"buffer {sorted(buffers)[0]!r} was built on the meta device and is not saved with the model's weights, so "
            "nothing would fill it. Pass FullyShardedDataParallelPlugin(param_init_fn=...) that computes it, or "
            "build the model with init_empty_weights(include_buffers=False)."
        )


def _keep_rest_on_device(model: nn.Module, ctx: ProcessContext, config: FullyShardedDataParallelPlugin) -> None:
    """Move what FSDP does not manage, buffers and ignored parameters, to the device."""
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.device != ctx.device:
                module._buffers[name] = buffer.to(ctx.device)
    for parameter in model.parameters():
        if not isinstance(parameter, DTensor) and parameter.device != ctx.device:
            parameter.data = parameter.data.to(ctx.device)


def _banner(
    model: nn.Module, mesh: DeviceMesh, policy: MixedPrecisionPolicy, config: FullyShardedDataParallelPlugin
) -> str:
    trained = {str(p.dtype).removeprefix("torch.") for p in model.parameters() if p.requires_grad}
    compute = policy.param_dtype or "the same"
    where = "host memory" if config.cpu_offload else "the device"
    names = mesh.mesh_dim_names or ()
    return (
        f"{type(model).__name__} is sharded over {dict(zip(names, mesh.shape, strict=True))}: master weights "
        f"{' and '.join(sorted(trained)) or 'none (frozen)'} in {where}, computing in "
        f"{str(compute).removeprefix('torch.')}, reducing in "
        f"{str(policy.reduce_dtype or compute).removeprefix('torch.')}"
    )
