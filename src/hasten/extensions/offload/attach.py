"""Offload in a run: refused combinations, and the optimizers and blocks that take part."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from torch import nn
from torch.optim import Adafactor, Muon, Optimizer, SparseAdam

from hasten.config.root import Config
from hasten.errors import ConfigError, PrepareError
from hasten.extensions.offload.memory_budget import count_memory
from hasten.extensions.offload.pieces import call_weakly
from hasten.extensions.offload.update import StreamedUpdate
from hasten.extensions.offload.weights import (
    PlaceRest,
    StreamedParameters,
    StreamedWeights,
    is_streamed,
)
from hasten.modules.names import is_dtensor
from hasten.optim.engine import list_parameters
from hasten.runtime.context import ProcessContext
from hasten.runtime.mesh_plan import Axis
from hasten.runtime.streams import lanes_for
from hasten.strategies.base import OfferedOffload
from hasten.strategies.blocks import repeated_blocks
from hasten.strategies.sharded_updates import ELEMENTWISE


def refuse_combinations(config: Config, ctx: ProcessContext, compiles: bool) -> None:
    """Raise for settings that do not work with `offload`.

    Raises: ConfigError with an alternative.
    """
    offload_setting = f"offload={config.offload!r}"
    engine_settings = {
        "deepspeed": "deepspeed.offload_optimizer_device and deepspeed.offload_param_device",
        "megatron": "megatron.optimizer_cpu_offload",
        "xla": "more devices and strategy='xla' with sharding",
    }
    engine_name = "xla" if ctx.device.type == "xla" else config.strategy
    if engine_name in engine_settings:
        raise ConfigError(
            f"{offload_setting} is not supported with strategy={engine_name!r}, which updates the parameters itself, so nothing would be offloaded. Use "
            f"{engine_settings[engine_name]}, or strategy='fsdp'."
        )
    if config.fsdp.cpu_offload:
        raise ConfigError(
            f"{offload_setting} and fsdp.cpu_offload=True both decide where training state is, and cpu_offload also computes updates on the CPU. Remove "
            "fsdp.cpu_offload; offload='all' keeps the same state in host memory."
        )
    if config.offload != "optimizer":
        _refuse_with_parameters(config, ctx, offload_setting, compiles)


def _refuse_with_parameters(
    config: Config, ctx: ProcessContext, offload_setting: str, compiles: bool
) -> None:
    """Raise for settings with which parameters cannot be in host memory."""
    axis_sizes = {}
    for axis in (Axis.PP, Axis.TP, Axis.CP):
        if ctx.mesh.size(axis) > 1:
            axis_sizes[str(axis)] = ctx.mesh.size(axis)
    if axis_sizes or ctx.mesh.ep > 1:
        shown_sizes = (
            ", ".join(
                f"{axis}_size={axis_size}" for axis, axis_size in axis_sizes.items()
            )
            or f"ep_size={ctx.mesh.ep}"
        )
        raise ConfigError(
            f"{offload_setting} is not supported with {shown_sizes}: parameters in host memory have only been tested on one device and with FSDP2's shards. "
            "Use offload='optimizer', or only dp_shard_size."
        )
    is_sharded = config.strategy == "fsdp" or (
        config.strategy == "auto" and ctx.mesh.size(Axis.DP_SHARD) > 1
    )
    if ctx.world.size > 1 and not is_sharded:
        raise ConfigError(
            f"{offload_setting} is not supported with strategy={config.strategy!r} on {ctx.world.size} processes, whose replicas keep all parameters on "
            "the device. Use strategy='fsdp', or offload='optimizer'."
        )
    if compiles:
        if config.dynamo.backend != "no":
            compile_setting = f"dynamo backend {config.dynamo.backend!r}"
        else:
            compile_setting = "performance.compile"
        raise ConfigError(
            f"{offload_setting} is not supported with {compile_setting}: compiled code does not expect parameters that move between host and device. Use "
            "offload='optimizer', or dynamo_backend='no' and performance={'compile': False}."
        )
    if config.mixed_precision == "fp8":
        raise ConfigError(
            f"{offload_setting} is not supported with mixed_precision='fp8', which replaces the layers whose parameters are streamed. Use 'bf16', or "
            "offload='optimizer'."
        )


def refuse_unsplittable(optimizer: Optimizer) -> None:
    """Raise for an optimizer whose update of a parameter may depend on other parameters, or whose state cannot be moved.

    Raises: PrepareError with alternatives.
    """
    optimizer_name = f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"
    parameters = list_parameters(optimizer.param_groups)
    is_sharded = any(map(is_dtensor, parameters))
    if type(optimizer) not in (
        ELEMENTWISE if is_sharded else (*ELEMENTWISE, Adafactor, Muon)
    ):
        if isinstance(optimizer, SparseAdam):
            reason = "its state is sparse"
        else:
            reason = "it may need all (whole) parameters at once"
        raise PrepareError(
            f"offload is not supported with {optimizer_name}: state in host memory is updated in pieces, and {reason}, so results could differ from those "
            "without offload. Use AdamW, Adam, SGD or another optimizer of torch that updates each element by itself, or leave offload out."
        )
    for group in optimizer.param_groups:
        if group.get("differentiable"):
            raise PrepareError(
                f"offload is not supported with {optimizer_name}(differentiable=True): gradients through an update need its state on the device. Leave "
                "differentiable out, or offload."
            )


def stream_updates(
    optimizer: Optimizer,
    config: Config,
    ctx: ProcessContext,
    is_boundary: Callable[[], bool],
    models: Sequence[nn.Module],
) -> None:
    """Make an optimizer update its parameters in pieces, streamed from host memory.

    Blocks of the models ask for the memory of pieces that are still written back, before their activations need it.
    """
    refuse_unsplittable(optimizer)
    parameters = list_parameters(optimizer.param_groups)
    is_streamed_model = any(map(is_streamed, parameters))
    streamed_update = StreamedUpdate(
        optimizer,
        lanes_for(ctx.device),
        count_memory(ctx.device),
        is_boundary,
        moves_state=config.offload != "parameters",
        parameters=StreamedParameters() if is_streamed_model else None,
    )
    model_blocks: list[nn.Module] = []
    for model in models:
        model_blocks += [block for _, block in repeated_blocks(model)]
    streamed_update.drains_in_forward = bool(model_blocks)
    before_block = call_weakly(streamed_update.before_block)
    for block in model_blocks:
        block.register_forward_pre_hook(lambda module, inputs: before_block())


OPTIMIZER_STATE: Final = OfferedOffload(refuse_combinations, stream_updates)
PARAMETERS: Final = OfferedOffload(
    refuse_combinations,
    stream_updates,
    parameter_transforms=lambda: (PlaceRest(), StreamedWeights()),
)
