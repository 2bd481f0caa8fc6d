"""Choice of the transforms of a pipeline from the settings, and the combinations that are refused."""

from __future__ import annotations

from typing import Final

from hasten.config.base import given
from hasten.config.root import Config
from hasten.errors import ConfigError
from hasten.extensions.pipeline.strategy import CutStages, Pipeline
from hasten.runtime.context import ProcessContext
from hasten.runtime.mesh import WorldMesh
from hasten.runtime.mesh_plan import Axis
from hasten.strategies.base import (
    Caps,
    DistributionTransform,
    OfferedStrategy,
    Strategy,
)
from hasten.strategies.choose import common_transforms, recompute_blocks
from hasten.strategies.fsdp.strategy import ShardModel
from hasten.strategies.native import NativeStrategy, PlaceOnDevice, SingleProcess
from hasten.strategies.tensor.strategy import SplitLayers


def create_pipeline(config: Config, ctx: ProcessContext) -> Strategy:
    """Return the strategy for pp_size. Raises: ConfigError for settings that cannot be combined with it."""
    _refuse_with_stages(config)
    if ctx.mesh.size(Axis.CP) > 1:
        raise ConfigError(
            f"pp_size={ctx.mesh.size(Axis.PP)} is not supported with cp_size={ctx.mesh.size(Axis.CP)}; stages exchange whole sequences, "
            "so each part of a sequence would only attend to itself. Set cp_size=1 or pp_size=1."
        )
    sharded = ctx.mesh.size(Axis.DP_SHARD) > 1
    schedule = config.parallelism.pp_handler.schedule
    if sharded and schedule in ("interleaved_zero_bubble", "zbv_zero_bubble"):
        raise ConfigError(
            f"schedule {schedule!r} is not supported with dp_shard_size={ctx.mesh.size(Axis.DP_SHARD)}; zero-bubble schedules "
            "with sharded stages are not supported in this version. Use '1f1b' or 'interleaved_1f1b', or replicas instead of shards."
        )
    mesh = WorldMesh()
    transforms = common_transforms(config)
    within: DistributionTransform = SingleProcess()
    if sharded:
        within = ShardModel(
            config.fsdp, mesh, keep_outputs=config.autocast.output_dtype == "keep"
        )
    else:
        transforms.append(PlaceOnDevice())
    if ctx.mesh.size(Axis.TP) > 1:
        transforms.append(SplitLayers(config.parallelism, config.fsdp, mesh))
    if config.fsdp.activation_checkpointing and not config.recompute:
        transforms.append(recompute_blocks(config))
    stages = Pipeline(config.parallelism.pp_handler, config.fsdp, ctx, within)
    transforms.append(CutStages(stages))
    caps = Caps(
        sharded_state=sharded,
        hides_gradients=sharded and ctx.mesh.size(Axis.DP_REPLICATE) > 1,
    )
    return NativeStrategy("pipeline", stages, transforms, caps, stages)


def _refuse_with_stages(config: Config) -> None:
    """Raise for settings that pipeline stages would ignore."""
    sizes = f"pp_size={config.parallelism.pp_size}"
    if config.strategy not in ("auto", "ddp", "fsdp"):
        raise ConfigError(
            f"strategy={config.strategy!r} is not supported with {sizes}, which it cannot provide; use strategy='auto'."
        )
    if config.dynamo.backend != "no":
        raise ConfigError(
            f"dynamo.backend={config.dynamo.backend!r} is not supported with {sizes}; torch's compiler does not support a forward that "
            "is split into pipeline stages. Set dynamo_backend='no'."
        )
    if config.mixed_precision == "fp8":
        raise ConfigError(
            f"mixed_precision='fp8' is not supported in this version with {sizes}; use 'bf16'."
        )
    if config.parallelism.tp_handler.loss_parallel:
        raise ConfigError(
            f"loss_parallel is not supported with {sizes}, because stages exchange whole tensors; remove it, or set pp_size=1."
        )
    if given(config.ddp):
        raise ConfigError(
            f"ddp.{sorted(given(config.ddp))[0]} was set with {sizes}, where gradients are averaged once after all micro-batches and "
            "DistributedDataParallel is not used. Remove the options of DDP."
        )
    if config.fsdp.state_dict_type == "FULL_STATE_DICT":
        raise ConfigError(
            f"fsdp.state_dict_type='FULL_STATE_DICT' is not supported with {sizes}, because each stage writes its part of a checkpoint. "
            "Remove it; save_model() writes whole weights."
        )


STAGES: Final = OfferedStrategy(create=create_pipeline)
