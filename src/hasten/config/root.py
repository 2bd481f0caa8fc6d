"""The tree of all settings."""

from typing import TYPE_CHECKING, Final, Literal

from hasten.config.base import Section, setting, settings, with_extensions
from hasten.config.sections.launch import InitProcessGroupKwargs, LaunchConfig
from hasten.config.sections.loop import (
    AutocastKwargs,
    DataLoaderConfiguration,
    FP8Config,
    GradientAccumulationPlugin,
    GradScalerKwargs,
    MasterWeights,
    PerformanceSettings,
    PrecisionType,
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
from hasten.config.sections.trust import TrustSettings
from hasten.extension import offers

TORCH_STRATEGIES: Final = ("auto", "none", "ddp", "fsdp")
"""Values of the setting `strategy` that no extension provides."""
OffloadMode = Literal["optimizer", "parameters", "all"]

if TYPE_CHECKING:
    StrategyName = str
else:
    StrategyName = Literal[(*TORCH_STRATEGIES, *offers("strategies"))]


@settings
@with_extensions("")
class Config(Section):
    """All settings of a run."""

    mixed_precision: PrecisionType = setting(
        "no", "compute precision of forward and backward"
    )
    master_weights: MasterWeights = setting(
        "fp32",
        "dtype of half-precision weights trained under mixed precision: fp32, or keep (the model's own)",
    )
    strategy: StrategyName = setting(
        "auto",
        "how training is distributed (auto: by the settings given; else ddp with several processes, none with one)",
    )
    cpu: bool = setting(
        False,
        "train on the CPU even if an accelerator is available",
        flags=("use_cpu",),
    )
    debug: bool = setting(
        False,
        "show hasten's logs and whole tracebacks",
    )
    checkpoint_in_memory: int | None = setting(
        None,
        "updates between two copies of the run's state in the memory of its machines, each at its neighbour as well: a lost machine costs "
        "no more than those (needs the launcher's --max_restarts)",
        minimum=1,
    )
    device_placement: bool = setting(
        True, "move models and batches to the process's device"
    )
    step_scheduler_with_optimizer: bool = setting(
        True, "schedulers step only with an applied update"
    )
    recompute: tuple[str, ...] = setting(
        (), "class names of blocks whose activations are recomputed in backward"
    )
    offload: OffloadMode | None = setting(
        None,
        "training state in host memory, streamed to the device for its use: optimizer (its state), parameters, or all (both)",
    )
    rng_types: tuple[str, ...] | None = setting(
        None,
        "random generators synchronised over all processes at the start of each epoch",
    )
    trust: TrustSettings = setting(factory=TrustSettings, help="checks of the run")
    launch: LaunchConfig = setting(
        factory=LaunchConfig, help="processes and machines", prefix=""
    )
    process_group: InitProcessGroupKwargs = setting(
        factory=InitProcessGroupKwargs, help="communication"
    )
    parallelism: ParallelismConfig = setting(
        factory=ParallelismConfig, help="the mesh", prefix="parallelism_config_"
    )
    ddp: DistributedDataParallelKwargs = setting(
        factory=DistributedDataParallelKwargs, help="plain data parallel"
    )
    fsdp: FullyShardedDataParallelPlugin = setting(
        factory=FullyShardedDataParallelPlugin, help="sharded data parallel"
    )
    gradient_accumulation: GradientAccumulationPlugin = setting(
        factory=GradientAccumulationPlugin, help="accumulation"
    )
    autocast: AutocastKwargs = setting(factory=AutocastKwargs, help="autocast")
    scaler: GradScalerKwargs = setting(factory=GradScalerKwargs, help="loss scaling")
    fp8: FP8Config = setting(factory=FP8Config, help="fp8")
    dynamo: TorchDynamoPlugin = setting(factory=TorchDynamoPlugin, help="torch.compile")
    performance: PerformanceSettings = setting(
        factory=PerformanceSettings, help="choices for speed"
    )
    dataloader: DataLoaderConfiguration = setting(
        factory=DataLoaderConfiguration, help="data"
    )
    project: ProjectConfiguration = setting(
        factory=ProjectConfiguration, help="project and checkpoints", prefix=""
    )
    tracking: TrackingConfig = setting(
        factory=TrackingConfig, help="trackers", prefix=""
    )
    profile: ProfileKwargs = setting(factory=ProfileKwargs, help="profiler")
