"""Choice of the strategy and the device of a run from its settings."""

from __future__ import annotations

import logging
from functools import partial
from typing import Final

import torch

from hasten.config.base import given
from hasten.config.root import TORCH_STRATEGIES, Config
from hasten.config.sections.loop import PerformanceSettings, TorchDynamoPlugin
from hasten.errors import ConfigError
from hasten.extension import load, strategy_by_environment
from hasten.runtime import env
from hasten.runtime.context import ProcessContext
from hasten.runtime.devices import choose_device
from hasten.runtime.mesh import WorldMesh
from hasten.runtime.mesh_plan import LOSS, Axis
from hasten.runtime.topology import Topology
from hasten.strategies.base import (
    Caps,
    OfferedOffload,
    OfferedStrategy,
    Strategy,
    Transform,
)
from hasten.strategies.blocks import blocks_by_class
from hasten.strategies.native import (
    Convert,
    NativeStrategy,
    PlaceOnDevice,
    SingleProcess,
)

log = logging.getLogger(__name__)

BACKEND: Final = "inductor"
"""Backend of the blocks that `performance="auto"` compiles."""


def choose_strategy(config: Config, ctx: ProcessContext) -> Strategy:
    """Return the strategy the settings ask for. Raises: ConfigError for settings that cannot be combined."""
    if ctx.mesh.cp > 1 and config.dynamo.backend != "no":
        raise ConfigError(
            f"cp_size={ctx.mesh.cp} replaces attention while a block runs, and dynamo backend "
            f"{config.dynamo.backend!r} compiles it once; the compiled model would only attend within each rank's part of a sequence. "
            "Set dynamo_backend=no, or cp_size=1."
        )
    offload = offload_of(config)
    if offload is not None:
        offload.refuse_combinations(config, ctx, compiles_models(config))
    if ctx.mesh.ep > 1:
        _refuse_with_experts(config, ctx)
    extension_strategy = _extension_strategy(config)
    if extension_strategy is not None:
        return extension_strategy.create(config, ctx)
    if ctx.mesh.pp > 1:
        pipeline: OfferedStrategy = load("mesh_axes", Axis.PP)
        return pipeline.create(config, ctx)
    if config.strategy == "fsdp" or (
        config.strategy == "auto" and ctx.mesh.dp_shard > 1
    ):
        return _sharded_strategy(config, ctx)
    return _replicated_strategy(config, ctx)


def device_for(config: Config, topology: Topology) -> torch.device:
    """Return the device of this process: the strategy's device, else the host's accelerator, else the CPU.

    Raises: DeviceError when the device does not exist.
    """
    extension_strategy = _extension_strategy(config)
    if extension_strategy is not None and extension_strategy.start_device is not None:
        return extension_strategy.start_device(config, topology)
    return choose_device(
        topology.local_rank,
        config.cpu,
        None if config.cpu else env.assigned_device(env.snapshot()),
    )


def _extension_strategy(config: Config) -> OfferedStrategy | None:
    """Return the strategy of an extension that the settings or the environment select; None for torch's parallelisms."""
    strategy_name: str | None = config.strategy
    if strategy_name == "auto" and not config.cpu:
        strategy_name = strategy_by_environment(env.snapshot())
        if strategy_name is not None:
            log.info(
                "strategy=auto selects %s, because of the environment", strategy_name
            )
    if strategy_name is None or strategy_name in TORCH_STRATEGIES:
        return None
    extension_strategy: OfferedStrategy = load("strategies", strategy_name)
    return extension_strategy


def offload_of(config: Config) -> OfferedOffload | None:
    """Return what keeps training state in host memory; None if all of it is on the device."""
    if config.offload is None:
        return None
    offload: OfferedOffload = load("offload_modes", config.offload)
    return offload


def _offloads_parameters(config: Config) -> bool:
    offload = offload_of(config)
    return offload is not None and offload.parameter_transforms is not None


def chooses_speed(performance: PerformanceSettings) -> bool:
    """Return whether to make choices for speed: with mode "auto", or without a mode when any of them was set."""
    return performance.mode == "auto" or (
        performance.mode is None and bool(given(performance))
    )


def compiles_models(config: Config) -> bool:
    """Return whether models are compiled."""
    return config.dynamo.backend != "no" or (
        chooses_speed(config.performance) and config.performance.compile
    )


def _replicated_strategy(config: Config, ctx: ProcessContext) -> Strategy:
    is_single_process = ctx.mesh.size(*LOSS) == 1
    if (ctx.mesh.tp > 1 or ctx.mesh.ep > 1) and config.strategy != "none":
        return _sharded_strategy(config, ctx)
    if config.strategy == "none" and not is_single_process:
        raise ConfigError(
            f"strategy='none' is not supported with {ctx.world.size} processes; their models would diverge. "
            "Use strategy='ddp', or start one process."
        )
    if ctx.mesh.dp_shard > 1:
        raise ConfigError(
            f"strategy={config.strategy!r} does not shard models, but dp_shard_size={ctx.mesh.dp_shard} requests sharding; "
            "use strategy='fsdp', or set dp_shard_size=1."
        )
    offload = offload_of(config)
    if offload is not None and offload.parameter_transforms is not None:
        place_parameters, stream_parameters = offload.parameter_transforms()
        streaming_transforms = [
            place_parameters,
            *common_transforms(config),
            stream_parameters,
        ]
        return NativeStrategy(
            "single", SingleProcess(), streaming_transforms, Caps(synchronises=False)
        )
    transforms: list[Transform] = [PlaceOnDevice(), *common_transforms(config)]
    has_automatic_speed = chooses_speed(config.performance)
    is_compiled = has_automatic_speed and config.performance.compile
    if is_compiled and config.dynamo.backend == "no":
        transforms.append(_compiled_automatically())
    if is_single_process:
        return NativeStrategy(
            "single", SingleProcess(), transforms, Caps(synchronises=False)
        )
    # a single process needs none of it
    from hasten.strategies.ddp.strategy import Replicate

    replicate = Replicate(
        config.ddp, by_size=has_automatic_speed and config.performance.buckets
    )
    caps = Caps(gradients_s=replicate.gradients_s)
    return NativeStrategy("ddp", replicate, transforms, caps)


def _sharded_strategy(config: Config, ctx: ProcessContext) -> Strategy:
    transforms = common_transforms(config)
    mesh = WorldMesh()
    if ctx.mesh.tp > 1:
        if (
            config.dynamo.backend != "no"
            and config.parallelism.tp_handler.loss_parallel
        ):
            raise ConfigError(
                f"dynamo backend {config.dynamo.backend!r} is not supported with loss_parallel, because compiling "
                "its communication has not been tested; set dynamo_backend=no, or remove it."
            )
        # also loads torch.distributed.tensor
        from hasten.strategies.tensor.strategy import SplitLayers

        transforms.append(SplitLayers(config.parallelism, config.fsdp, mesh))
    if ctx.mesh.ep > 1:
        # also loads torch.distributed.tensor
        from hasten.strategies.experts.strategy import DivideExperts

        transforms.append(DivideExperts(config.parallelism, config.fsdp, mesh))
    if config.fsdp.activation_checkpointing and not config.recompute:
        transforms.append(recompute_blocks(config))
    if (
        ctx.mesh.tp == ctx.world.size > 1
        and config.strategy != "fsdp"
        and not given(config.fsdp)
    ):
        # also loads torch.distributed.tensor
        from hasten.strategies.tensor.alone import TensorParallelOnly

        return NativeStrategy(
            "tensor",
            TensorParallelOnly(config.fsdp),
            transforms,
            Caps(sharded_state=True),
        )
    if compiles_models(config) and config.dynamo.backend == "no":
        transforms += _compiled_shards(config, ctx)
    # loads torch.distributed.tensor: most of a second
    from hasten.strategies.fsdp.strategy import ShardModel

    distribution = ShardModel(
        config.fsdp.replace(cpu_offload=True)
        if _offloads_parameters(config)
        else config.fsdp,
        mesh,
        keep_outputs=config.autocast.output_dtype == "keep",
    )
    caps = Caps(sharded_state=True, hides_gradients=ctx.mesh.dp_replicate > 1)
    return NativeStrategy("fsdp", distribution, transforms, caps)


def _compiled_shards(config: Config, ctx: ProcessContext) -> list[Transform]:
    """Return the transform that compiles sharded blocks; empty, with the reason logged, where it has not been tested."""
    untested = {
        "tensor parallelism": ctx.mesh.tp > 1,
        "context parallelism": ctx.mesh.cp > 1,
        "expert parallelism": ctx.mesh.ep > 1,
        "parameters in host memory": config.fsdp.cpu_offload
        or _offloads_parameters(config),
    }
    untested_settings = [name for name, is_set in untested.items() if is_set]
    if untested_settings:
        log.info(
            "performance: models are not compiled: it has not been tested with shards and %s",
            untested_settings[0],
        )
        return []
    return [_compiled_automatically()]


def _compiled_automatically() -> Transform:
    """Return the transform that compiles blocks for `performance="auto"`."""
    # only runs that compile models need it
    from hasten.strategies.compiling import CompileBlocks

    settings = TorchDynamoPlugin(
        backend=BACKEND, use_regional_compilation=True, compile_loss=True
    )
    return CompileBlocks(settings, automatic=True)


def _refuse_with_experts(config: Config, ctx: ProcessContext) -> None:
    """Raise for settings that do not work with expert parallelism."""
    if config.dynamo.backend != "no":
        raise ConfigError(
            f"dynamo backend {config.dynamo.backend!r} is not supported with ep_size={ctx.mesh.ep}; the number of exchanged tokens is "
            "only known at run time, and compiling this has not been tested. Set dynamo_backend=no, or "
            "ep_size=1."
        )
    if config.strategy == "ddp" and given(config.ddp):
        raise ConfigError(
            f"ddp.{sorted(given(config.ddp))[0]} was set with ep_size={ctx.mesh.ep}, where torch's fully_shard synchronizes the "
            "replicas and DistributedDataParallel is not used. Remove the options of DDP."
        )


def common_transforms(config: Config) -> list[Transform]:
    """Return the transforms that all native strategies share: compute precision, recompute and compile."""
    transforms: list[Transform] = []
    if config.mixed_precision != "no":
        transforms.append(Convert(config.master_weights))
    if config.recompute:
        # only runs that recompute activations need it
        from hasten.strategies.recompute import Recompute

        find_blocks = partial(
            blocks_by_class, names=config.recompute, setting="recompute"
        )
        transforms.append(
            Recompute(
                find_blocks, "recompute", config.fsdp.activation_checkpointing_offload
            )
        )
    if config.dynamo.backend != "no":
        # only runs that compile models need it
        from hasten.strategies.compiling import CompileBlocks, CompileWhole

        regional = config.dynamo.use_regional_compilation
        transforms.append(
            CompileBlocks(config.dynamo) if regional else CompileWhole(config.dynamo)
        )
    return transforms


def recompute_blocks(config: Config) -> Transform:
    """Return the transform that recomputes the activations of the blocks that FSDP wraps."""
    # only runs that recompute activations need it
    from hasten.strategies.fsdp.shard_groups import blocks_to_recompute
    from hasten.strategies.recompute import Recompute

    find_blocks = partial(blocks_to_recompute, fsdp_config=config.fsdp)
    return Recompute(
        find_blocks,
        "fsdp.activation_checkpointing",
        config.fsdp.activation_checkpointing_offload,
    )
