"""Settings of the training loop: checkpoints, loaders, optimizers, speed, precision, compilation, trackers, metrics."""

from collections.abc import Callable, Mapping
from typing import Any, Final, Literal

from hasten.config.base import Section, SectionNames, setting, settings


@settings
class ProjectConfiguration(Section):
    """Folders of logs and checkpoints, and the checkpoints to keep."""

    section_names = SectionNames(argument="project_config")

    project_dir: str | None = setting(None, "folder (or URL) of the run", path=True)
    logging_dir: str | None = setting(
        None, "folder of tracker logs (default: project_dir)", path=True
    )
    automatic_checkpoint_naming: bool | None = setting(
        None,
        "checkpoints are numbered under project_dir/checkpoints: always (true), never (false; save_state needs a folder), "
        "or when save_state gets no folder (default)",
    )
    total_limit: int | None = setting(
        None, "number of newest checkpoints to keep", minimum=1
    )
    iteration: int = setting(0, "number of the next checkpoint", minimum=0)
    save_on_each_node: bool = setting(
        False, "machines do not share a file system: each writes the files it needs"
    )
    keep_best: int | None = setting(
        None, "further checkpoints to keep: the best by best_metric", minimum=1
    )
    best_metric: str | None = setting(None, "metric that ranks checkpoints")
    best_mode: Literal["min", "max"] = setting(
        "min", "whether lower or higher values are better"
    )
    keep_every: int | None = setting(
        None, "further checkpoints to keep: every n-th", minimum=1
    )
    run_log: bool = setting(
        True, "write timings and events for `hasten report` to project_dir/run_log"
    )
    checkpoint_arrival_s: float = setting(
        60.0,
        "seconds that save_state and load_state wait for ranks that have not arrived",
        minimum=0.1,
    )


Pad = Literal["least", "full"]


@settings
class DataLoaderConfiguration(Section):
    """Options of splitting, shuffling, moving and resuming loaders."""

    section_names = SectionNames(argument="dataloader_config")

    split_batches: bool = setting(
        False,
        "the loader's batch size is the global one, split over processes",
        flags=("split_batches",),
    )
    dispatch_batches: bool | None = setting(
        None,
        "rank 0 reads the batches and sends each process its slice (default: no)",
        flags=("dispatch_batches",),
    )
    even_batches: bool = setting(
        True,
        "every process sees the same number of samples, the first ones repeated if needed",
        flags=("even_batches",),
    )
    already_sharded: bool | None = setting(
        None,
        "every process's loader holds its own part of the data (default: recognised where it can be, and compared)",
    )
    pad: Pad = setting(
        "least",
        "how even_batches fills the last step of an epoch: least: up to equal shares; full: up to whole batches",
    )
    use_seedable_sampler: bool = setting(
        True,
        "shuffle as a function of (seed, epoch), the same on all processes",
        flags=("use_seedable_sampler",),
    )
    data_seed: int | None = setting(
        None,
        "seed of the shuffle (default: torch's seed at prepare)",
        minimum=0,
        flags=("data_seed",),
    )
    non_blocking: bool = setting(
        False, "copy batches to the device without waiting", flags=("non_blocking",)
    )
    use_stateful_dataloader: bool = setting(
        False, "use torchdata's StatefulDataLoader", flags=("use_stateful_dataloader",)
    )
    prefetch: int | None = setting(
        None,
        "batches kept ahead on the device (default: 2 on accelerators, 0 on CPU)",
        minimum=0,
        maximum=1024,
    )
    pin_memory: bool | None = setting(
        None,
        "pin batches before they are copied to a GPU (default: when worker processes read them)",
    )
    prefetch_skip_keys: tuple[str, ...] = setting(
        (), "keys of a batch that stay on the host"
    )


MAX_MICRO_STEPS: Final = 1_000_000


@settings
class GradientAccumulationPlugin(Section):
    """Options of gradient accumulation over micro-steps."""

    section_names = SectionNames(argument="gradient_accumulation_plugin")

    num_steps: int = setting(
        1,
        "micro-steps per optimizer update",
        minimum=1,
        maximum=MAX_MICRO_STEPS,
        flag="gradient_accumulation_steps",
    )
    adjust_scheduler: bool = setting(
        True, "accepted for compatibility: schedulers count updates either way"
    )
    sync_with_dataloader: bool = setting(
        True, "finish the window at the end of the loader"
    )
    sync_each_batch: bool = setting(
        False, "reduce gradients in every micro-step: less memory, more traffic"
    )


@settings
class PerformanceSettings(Section):
    """Optimizations that change results by rounding at most; each is logged with its reason and can be turned off."""

    section_names = SectionNames(argument="performance", word_fields=("mode",))

    mode: Literal["auto", "off"] | None = setting(
        None,
        "make the choices below where they apply (default: off, or auto when one of them is given)",
        flag="performance",
    )
    fused: bool = setting(True, "fused optimizers on CUDA, where torch has them")
    buckets: bool = setting(True, "size of DDP's buckets by the size of the model")
    compile: bool = setting(True, "compile repeated blocks, and transformers' losses")
    step_graph: bool = setting(
        True, "run steps given to capture_step() as one CUDA graph"
    )


PrecisionType = Literal["no", "fp16", "bf16", "fp8"]
MasterWeights = Literal["fp32", "keep"]


@settings
class AutocastKwargs(Section):
    """Options of autocast."""

    section_names = SectionNames(is_handler=True)

    enabled: bool = setting(True, "cast inside the model's forward and autocast()")
    cache_enabled: bool | None = setting(
        None, "keep cast weights within one forward (default: torch's choice)"
    )
    output_dtype: Literal["fp32", "keep"] = setting(
        "fp32", "dtype of a prepared model's float outputs"
    )


@settings
class GradScalerKwargs(Section):
    """Options of dynamic loss scaling under fp16."""

    section_names = SectionNames(is_handler=True)

    init_scale: float = setting(65536.0, "first scale of the loss", minimum=0)
    growth_factor: float = setting(
        2.0, "factor after growth_interval steps without overflow", minimum=1
    )
    backoff_factor: float = setting(0.5, "factor after an overflow", minimum=0)
    growth_interval: int = setting(
        2000, "steps without overflow before the scale grows", minimum=1
    )
    enabled: bool = setting(True, "scale the loss under fp16")
    max_skipped_steps: int | None = setting(
        50,
        "updates skipped in a row after which training stops with an error (none: go on)",
        minimum=1,
    )


@settings
class AORecipeKwargs(Section):
    """Options of fp8 through torchao."""

    section_names = SectionNames(is_handler=True)

    config: Any = setting(None, "a torchao Float8LinearConfig", code_only=True)
    recipe_name: Literal["tensorwise", "rowwise", "rowwise_with_gw_hp"] | None = (
        setting(None, "a named torchao recipe")
    )
    module_filter_func: Callable[..., bool] | None = setting(
        None, "which linear layers are converted", code_only=True
    )
    skip_first_and_last: bool = setting(
        True, "leave the first and the last linear layer in high precision"
    )
    pad_inner_dim: bool = setting(
        True, "pad inner dimensions that are not multiples of 16"
    )
    enable_fsdp_float8_all_gather: bool = setting(True, "gather FSDP2 shards in fp8")


@settings
class TERecipeKwargs(Section):
    """Options of fp8 through NVIDIA Transformer Engine."""

    section_names = SectionNames(is_handler=True)

    use_autocast_during_eval: bool = setting(False, "fp8 in evaluation too")
    margin: int = setting(0, "margin of the scaling factor")
    interval: int = setting(
        1, "steps between two recomputations of the scaling factor", minimum=1
    )
    fp8_format: Literal["HYBRID", "E4M3", "E5M2"] = setting(
        "HYBRID", "number format", flag="fp8_format"
    )
    amax_history_len: int = setting(1024, "length of the history of maxima", minimum=1)
    amax_compute_algo: Literal["max", "most_recent"] = setting(
        "most_recent", "how a maximum is taken from the history"
    )
    override_linear_precision: tuple[bool, bool, bool] = setting(
        (False, False, False), "compute fprop, dgrad, wgrad in high precision"
    )
    use_mxfp8_block_scaling: bool = setting(False, "MXFP8 block scaling (Blackwell)")


@settings
class FP8Config(Section):
    """Implementation of fp8 and its recipe."""

    section_names = SectionNames(is_handler=True)

    backend: Literal["auto", "ao", "te"] = setting(
        "auto", "torchao or Transformer Engine (auto: the installed one)"
    )
    ao: AORecipeKwargs = setting(
        factory=AORecipeKwargs, help="recipe of torchao", prefix="fp8_"
    )
    te: TERecipeKwargs = setting(
        factory=TERecipeKwargs, help="recipe of Transformer Engine", prefix="fp8_"
    )


DynamoBackend = Literal[
    "no",
    "eager",
    "aot_eager",
    "inductor",
    "cudagraphs",
    "aot_ts_nvfuser",
    "nvprims_nvfuser",
    "ofi",
    "fx2trt",
    "onnxrt",
    "tensorrt",
    "tvm",
    "openxla",
    "aot_torchxla_trace_once",
    "torchxla_trace_once",
    "hpu_backend",
    "neuron",
]


@settings
class TorchDynamoPlugin(Section):
    """Options of torch.compile; backend "no" does not compile the model."""

    section_names = SectionNames(argument="dynamo_plugin")

    backend: DynamoBackend | str | Callable[..., Any] = setting(
        "no", "compiler backend (inductor, aot_eager, cudagraphs, …; no = off)"
    )
    mode: Literal[
        "default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"
    ] = setting("default", "balance of compile time and speed")
    fullgraph: bool = setting(
        False, "a graph break is an error", flags=("dynamo_use_fullgraph",)
    )
    dynamic: bool | None = setting(
        None,
        "compile for changing shapes (default: after the first change)",
        flags=("dynamo_use_dynamic",),
    )
    options: Mapping[str, Any] | None = setting(None, "options of the backend")
    disable: bool = setting(False, "turn compilation into a no-op for testing")
    use_regional_compilation: bool = setting(
        False, "compile the repeated block once instead of the whole model"
    )
    compile_loss: bool = setting(
        False,
        "with use_regional_compilation: also compile transformers' loss function, and norms outside blocks",
    )

    @property
    def makes_cuda_graphs(self) -> bool:
        """True if the compiler captures its own CUDA graphs, whose outputs the next step overwrites."""
        graphs = (
            self.mode in ("reduce-overhead", "max-autotune")
            or self.backend == "cudagraphs"
        )
        return graphs and self.backend != "no" and not self.disable


@settings
class ProfileKwargs(Section):
    """Options of torch.profiler."""

    section_names = SectionNames(is_handler=True)

    activities: tuple[Literal["cpu", "cuda", "xpu", "mtia", "hpu"], ...] | None = (
        setting(None, "what is recorded (default: all present)")
    )
    schedule_option: Mapping[str, int] | None = setting(
        None, "wait, warmup, active, repeat, skip_first of a schedule"
    )
    on_trace_ready: Callable[..., Any] | None = setting(
        None, "called with every finished trace", code_only=True
    )
    record_shapes: bool = setting(False, "record input shapes")
    profile_memory: bool = setting(False, "record allocations")
    with_stack: bool = setting(False, "record source lines")
    with_flops: bool = setting(
        False, "estimate operations of matrix products and convolutions"
    )
    with_modules: bool = setting(False, "record the module hierarchy")
    output_trace_dir: str | None = setting(
        None, "folder of one Chrome trace per rank", path=True
    )


@settings
class TrackingConfig(Section):
    """Options of experiment trackers."""

    section_names = SectionNames(argument="tracking")

    log_with: tuple[str, ...] = setting(
        (), "trackers: jsonl, tensorboard, wandb, mlflow, …, or all"
    )
    missing_tracker: Literal["error", "warn"] = setting(
        "error",
        "what to do if the package of a named tracker is not installed; warn continues without it",
    )
