"""Keyword arguments of the Accelerator that its signature does not list, typed for editors and type checkers.

Contains every top-level name of the schema, and every name of Accelerate in `layers.ARGUMENTS`; a test compares them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias, TypedDict

from hasten.config.sections.engines import DeepSpeedPlugin, MegatronLMPlugin, XLAConfig
from hasten.config.sections.launch import InitProcessGroupKwargs, LaunchConfig
from hasten.config.sections.loop import (
    AutocastKwargs,
    DataLoaderConfiguration,
    FP8Config,
    GradientAccumulationPlugin,
    GradScalerKwargs,
    PerformanceSettings,
    ProfileKwargs,
    ProjectConfiguration,
    TorchDynamoPlugin,
    TrackingConfig,
)
from hasten.config.sections.parallel import (
    DistributedDataParallelKwargs,
    FullyShardedDataParallelPlugin,
    ParallelismConfig,
)

Fields: TypeAlias = Mapping[str, Any]
"""A section as a mapping of its fields."""


class Keywords(TypedDict, total=False):
    """Settings by name; a section is passed as its class or as a mapping, and None leaves a setting to the other sources."""

    # single settings
    master_weights: str | None
    debug: bool | None
    stall: str | None
    stall_after_s: float | None
    divergence: str | None
    divergence_every: int | None
    divergence_ignore: Sequence[str] | None
    numbers: str | None
    numbers_rollbacks: int | None
    numbers_spike: float | None
    checkpoint_in_memory: int | None
    step_scheduler_with_optimizer: bool | None
    recompute: Sequence[str] | None
    rng_types: Sequence[str] | None
    dynamo_backend: str | None
    split_batches: bool | None

    # sections under Accelerate's names
    dataloader_config: DataLoaderConfiguration | Fields | None
    project_config: ProjectConfiguration | Fields | None
    gradient_accumulation_plugin: GradientAccumulationPlugin | Fields | None
    fsdp_plugin: FullyShardedDataParallelPlugin | Fields | None
    deepspeed_plugin: DeepSpeedPlugin | Fields | None
    megatron_lm_plugin: MegatronLMPlugin | Fields | None
    dynamo_plugin: TorchDynamoPlugin | Fields | None
    parallelism_config: ParallelismConfig | Fields | None

    # sections under hasten's names
    launch: LaunchConfig | Fields | None
    process_group: InitProcessGroupKwargs | Fields | None
    parallelism: ParallelismConfig | Fields | None
    ddp: DistributedDataParallelKwargs | Fields | None
    fsdp: FullyShardedDataParallelPlugin | Fields | None
    deepspeed: DeepSpeedPlugin | Fields | None
    megatron: MegatronLMPlugin | Fields | None
    xla: XLAConfig | Fields | None
    gradient_accumulation: GradientAccumulationPlugin | Fields | None
    autocast: AutocastKwargs | Fields | None
    scaler: GradScalerKwargs | Fields | None
    fp8: FP8Config | Fields | None
    dynamo: TorchDynamoPlugin | Fields | None
    performance: PerformanceSettings | Fields | str | None
    dataloader: DataLoaderConfiguration | Fields | None
    project: ProjectConfiguration | Fields | None
    tracking: TrackingConfig | Fields | None
    profile: ProfileKwargs | Fields | None
