"""Choosing the strategy of a run from its settings."""

from __future__ import annotations

import logging
from functools import partial
from importlib import import_module
from typing import assert_never

from hasten.config.root import Config
from hasten.errors import ConfigError
from hasten.runtime.axes import LOSS, Axis, MeshSpec
from hasten.runtime.context import ProcessContext
from hasten.runtime.mesh import WorldMesh
from hasten.strategies.alone import Alone
from hasten.strategies.base import Caps, Spread, Strategy, Transform
from hasten.strategies.blocks import blocks_by_class
from hasten.strategies.compiling import CompileBlocks, CompileWhole
from hasten.strategies.ddp import Replicate
from hasten.strategies.native import NativeStrategy
from hasten.strategies.placing import Convert, Place
from hasten.strategies.recompute import Recompute
from hasten.strategies.wrapping import blocks_to_recompute

log = logging.getLogger(__name__)


def mesh_of(config: Config, local_world_size: int, world_size: int) -> MeshSpec:
    """The mesh for a world size: the given axes, and the rest to replicas or, when sharding, to shards."""
    sizes = config.parallelism
    shard, replicate = sizes.dp_shard_size, sizes.dp_replicate_size
    if config.strategy == "fsdp" and shard is None:
        if config.fsdp.hybrid_shard and replicate is None:
            shard, replicate = local_world_size, -1
        else:
            shard = -1 if replicate != -1 else 1
    return MeshSpec.build(
        world_size,
        pp=sizes.pp_size,
        dp_replicate=replicate,
        dp_shard=1 if shard is None else shard,
        cp=sizes.cp_size,
        tp=sizes.tp_size,
    )


def choose(config: Config, ctx: ProcessContext) -> Strategy:
    """The strategy the settings ask for. Raises: ConfigError for one that is not in this version."""
    for axis in (Axis.PP, Axis.CP):
        if ctx.mesh.size(axis) > 1:
            raise ConfigError(
                f"{axis}_size={ctx.mesh.size(axis)} was asked for, but this version spreads models over the data "
                f"parallel axes only; training would silently ignore it. Set {axis}_size=1."
            )
    match config.strategy:
        case "auto" if ctx.mesh.size(Axis.DP_SHARD) > 1:
            return _sharded(config, ctx)
        case "auto" | "none" | "ddp":
            return _replicated(config, ctx)
        case "fsdp":
            return _sharded(config, ctx)
        case "deepspeed":
            engine = import_module("hasten.strategies.deepspeed")  # an optional package
            chosen: Strategy = engine.DeepSpeedStrategy(config)
            return chosen
        case "megatron" | "xla":
            raise ConfigError(
                f"strategy={config.strategy!r} is not in this version yet, and falling back to another one would "
                "change what you asked for; use 'ddp' or 'fsdp'."
            )
        case other:
            assert_never(other)


def _replicated(config: Config, ctx: ProcessContext) -> Strategy:
    alone = ctx.mesh.size(*LOSS) == 1
    if ctx.mesh.size(Axis.TP) > 1 and config.strategy != "none":
        return _sharded(config, ctx)
    if config.strategy == "none" and not alone:
        raise ConfigError(
            f"strategy='none' was asked for with {ctx.world.size} processes; their models would drift apart. "
            "Use strategy='ddp', or start one process."
        )
    if ctx.mesh.size(Axis.DP_SHARD) > 1:
        raise ConfigError(
            f"strategy={config.strategy!r} keeps whole models, but dp_shard_size={ctx.mesh.size(Axis.DP_SHARD)} asks "
            "to shard them; use strategy='fsdp', or set dp_shard_size=1."
        )
    spread = Alone() if alone else Replicate(config.ddp)
    transforms: list[Transform] = [Place(), Convert(config.master_weights), *_common(config)]
    caps = Caps(joins_uneven_inputs=True, synchronises=not alone)
    return NativeStrategy("single" if alone else "ddp", spread, transforms, caps)


def _sharded(config: Config, ctx: ProcessContext) -> Strategy:
    transforms: list[Transform] = [Convert(config.master_weights), *_common(config)]
    mesh = WorldMesh()
    if ctx.mesh.size(Axis.TP) > 1:
        tensor = import_module("hasten.strategies.tensor")  # likewise loads torch.distributed.tensor
        transforms.append(tensor.SplitLayers(config.parallelism, config.fsdp, mesh))
    if config.fsdp.activation_checkpointing and not config.recompute:
        find = partial(blocks_to_recompute, config=config.fsdp)
        offload = config.fsdp.activation_checkpointing_offload
        transforms.append(Recompute(find, "fsdp.activation_checkpointing", offload))
    fsdp2 = import_module("hasten.strategies.fsdp2")  # loads torch.distributed.tensor, most of a second
    spread: Spread = fsdp2.Shard(config.fsdp, mesh, keep_outputs=config.autocast.output_dtype == "keep")
    caps = Caps(sharded_state=True, hides_gradients=ctx.mesh.size(Axis.DP_REPLICATE) > 1)
    return NativeStrategy("fsdp", spread, transforms, caps)


def _common(config: Config) -> list[Transform]:
    """The transforms every native strategy shares: recompute and compile."""
    chosen: list[Transform] = []
    if config.recompute:
        find = partial(blocks_by_class, names=config.recompute, setting="recompute")
        chosen.append(Recompute(find, "recompute", config.fsdp.activation_checkpointing_offload))
    if config.dynamo.backend != "no":
        regional = config.dynamo.use_regional_compilation
        chosen.append(CompileBlocks(config.dynamo) if regional else CompileWhole(config.dynamo))
    return chosen
