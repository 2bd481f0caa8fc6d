"""Settings of parallelism: the mesh, its handlers, DDP and FSDP."""

from collections.abc import Callable, Mapping
from typing import Any, Literal

from hasten.config.base import Section, SectionNames, setting, settings

TensorStyle = Literal[
    "colwise",
    "rowwise",
    "colwise_gather_output",
    "rowwise_split_input",
    "embedding_rowwise",
    "embedding_colwise",
    "replicate",
    "replicate_sum_gradients",
    "experts",
]
CommHook = Literal["no", "fp16", "bf16", "power_sgd", "batched_power_sgd"]
PipelineSchedule = Literal[
    "gpipe",
    "1f1b",
    "interleaved_1f1b",
    "interleaved_zero_bubble",
    "zbv_zero_bubble",
    "loop_bfs",
]


@settings
class TorchTensorParallelConfig(Section):
    """Options of tensor parallelism."""

    enable_async_tp: bool = setting(
        False,
        "overlap tensor-parallel communication with matrix products",
        flag="parallelism_config_enable_async_tp",
    )
    loss_parallel: bool = setting(
        False, "keep logits sharded over the vocabulary in the loss"
    )


@settings
class TorchContextParallelConfig(Section):
    """Options of context parallelism (one long sequence over several processes)."""

    cp_comm_strategy: Literal["allgather", "alltoall", "ring", "ulysses"] = setting(
        "allgather",
        "how attention spans ranks: keys gathered, or heads exchanged (ulysses)",
    )
    load_balance: bool = setting(
        True,
        "give every rank an equal share of a causal mask's work",
        flag="parallelism_config_cp_load_balance",
    )


@settings
class DeepSpeedSequenceParallelConfig(Section):
    """Options of DeepSpeed's sequence parallelism (Ulysses)."""

    sp_seq_length: int | None = setting(
        None, "length of the sequences, when fixed", minimum=1
    )
    sp_seq_length_is_variable: bool = setting(
        True, "sequences differ in length from batch to batch"
    )
    sp_attn_implementation: Literal[
        "sdpa", "flash_attention_2", "flash_attention_3"
    ] = setting("sdpa", "attention kernel used under sequence parallelism")


@settings
class PipelineParallelConfig(Section):
    """Options of pipeline parallelism."""

    schedule: PipelineSchedule = setting(
        "1f1b", "order of forward and backward passes over micro-batches"
    )
    num_microbatches: int | None = setting(
        None, "micro-batches per step (default: one per stage)", minimum=1
    )
    split_points: tuple[str, ...] | None = setting(
        None,
        "names of the blocks that begin a new stage (default: stages of equal work)",
    )
    stages_per_rank: int | None = setting(
        None,
        "stages on each process under interleaved schedules (default: 2)",
        minimum=1,
    )
    first_stage: tuple[str, ...] = setting(
        (), "modules that run before the blocks, where they are registered after them"
    )
    last_stage: tuple[str, ...] = setting(
        (), "modules that run after the blocks, where they are registered before them"
    )


@settings
class ParallelismConfig(Section):
    """Sizes of the mesh's axes; their product is the number of processes. -1 fills an axis with the remaining processes.

    `ep_size` is not a factor of the product: it divides the data-parallel processes over which experts are sharded.
    A data-parallel size that is not given (None) is set by the strategy: replicas for DDP, shards for FSDP.
    """

    section_names = SectionNames(argument="parallelism_config")

    dp_replicate_size: int | None = setting(
        None,
        "copies of the model (DDP, or the outer axis of HSDP)",
        minimum=1,
        also=(-1,),
        flags=("dp_replicate_size",),
    )
    dp_shard_size: int | None = setting(
        None,
        "processes one copy is sharded over (FSDP)",
        minimum=1,
        also=(-1,),
        flags=("dp_shard_size",),
    )
    tp_size: int = setting(
        1,
        "processes one layer is split over (tensor parallel)",
        minimum=1,
        also=(-1,),
        flags=("tp_size",),
    )
    cp_size: int = setting(
        1,
        "processes one sequence is split over (context parallel)",
        minimum=1,
        also=(-1,),
        flags=("cp_size",),
    )
    pp_size: int = setting(
        1,
        "stages the layers are divided into (pipeline parallel)",
        minimum=1,
        also=(-1,),
        flags=("pp_size",),
    )
    ep_size: int = setting(
        1,
        "data-parallel processes the experts of a mixture are divided among (expert parallel)",
        minimum=1,
        also=(-1,),
        flags=("ep_size",),
    )
    ep_plan: Literal["auto"] | tuple[str, ...] = setting(
        "auto",
        "patterns of the names of modules that hold experts (auto: those with num_experts stacked weights)",
    )
    tp_plan: Literal["auto"] | Mapping[str, str] = setting(
        "auto",
        "how layers are split, by patterns of module names (auto: the model's own plan)",
    )
    tp_divide: tuple[str, ...] = setting(
        (), "attributes that count what is split, such as num_heads: divided by tp_size"
    )
    sp_size: int = setting(
        1,
        "processes one sequence is split over under DeepSpeed (Ulysses)",
        minimum=1,
        flags=("sp_size",),
    )
    cp_backend: Literal["torch"] = setting(
        "torch", "implementation of context parallelism"
    )
    sp_backend: Literal["deepspeed"] = setting(
        "deepspeed", "implementation of sequence parallelism"
    )
    tp_handler: TorchTensorParallelConfig = setting(
        factory=TorchTensorParallelConfig,
        help="options of tensor parallelism",
        prefix="parallelism_config_tp_",
    )
    cp_handler: TorchContextParallelConfig = setting(
        factory=TorchContextParallelConfig,
        help="options of context parallelism",
        prefix="parallelism_config_",
    )
    pp_handler: PipelineParallelConfig = setting(
        factory=PipelineParallelConfig,
        help="options of pipeline parallelism",
        prefix="parallelism_config_pp_",
    )
    sp_handler: DeepSpeedSequenceParallelConfig = setting(
        factory=DeepSpeedSequenceParallelConfig,
        help="options of sequence parallelism",
        prefix="parallelism_config_",
    )


@settings
class DistributedDataParallelKwargs(Section):
    """Options of torch's DistributedDataParallel."""

    section_names = SectionNames(is_handler=True)

    dim: int = setting(0, "batch dimension of inputs scattered over devices", minimum=0)
    broadcast_buffers: bool = setting(
        True, "copy buffers from rank 0 before each forward"
    )
    init_sync: bool = setting(
        True, "copy parameters and buffers from rank 0 at the start"
    )
    bucket_cap_mb: float = setting(25, "size of a gradient bucket in MiB", minimum=0)
    find_unused_parameters: bool = setting(
        False, "allow parameters that take no part in the loss"
    )
    check_reduction: bool = setting(False, "accepted by torch, without effect")
    gradient_as_bucket_view: bool = setting(
        False, "gradients are views of the buckets: less memory"
    )
    static_graph: bool = setting(False, "the same parameters take part in every step")
    skip_all_reduce_unused_params: bool = setting(
        False, "do not reduce parameters unused on every rank"
    )
    comm_hook: CommHook = setting("no", "compression of gradients for communication")
    comm_wrapper: Literal["no", "fp16", "bf16"] = setting(
        "no", "cast around a PowerSGD hook"
    )
    comm_state_option: Mapping[str, Any] = setting(
        factory=dict,
        help="options of the PowerSGD state, such as matrix_approximation_rank",
    )


DtypeName = Literal["fp32", "bf16", "fp16"]
WrapPolicy = Literal["auto", "transformer_based_wrap", "size_based_wrap", "no_wrap"]


@settings
class FSDPMixedPrecision(Section):
    """Dtypes of FSDP2; None follows mixed_precision."""

    param_dtype: DtypeName | None = setting(None, "dtype of gathered parameters")
    reduce_dtype: DtypeName | None = setting(None, "dtype of the gradient reduction")
    output_dtype: DtypeName | None = setting(None, "dtype outputs are cast to")
    cast_forward_inputs: bool = setting(True, "cast inputs to param_dtype")


@settings
class FullyShardedDataParallelPlugin(Section):
    """Options of FSDP2 (`torch.distributed.fsdp.fully_shard`)."""

    section_names = SectionNames(argument="fsdp_plugin", strategy="fsdp")

    reshard_after_forward: bool | int = setting(
        True,
        "free gathered parameters after forward (an integer reshards to that many ranks)",
    )
    hybrid_shard: bool = setting(
        False, "shard inside each machine, replicate across machines (HSDP)"
    )
    auto_wrap_policy: WrapPolicy | Callable[..., Any] = setting(
        "auto", "which modules are sharded on their own"
    )
    transformer_cls_names_to_wrap: tuple[str, ...] | None = setting(
        None,
        "class names of blocks sharded on their own",
        flags=("fsdp_transformer_layer_cls_to_wrap",),
    )
    min_num_params: int | None = setting(
        None, "smallest module sharded on its own, in parameters", minimum=0
    )
    ignored_modules: str | tuple[Any, ...] | None = setting(
        None, "modules left whole: a regular expression over names, or the modules"
    )
    dtypes: FSDPMixedPrecision = setting(
        factory=FSDPMixedPrecision, help="dtypes; default follows mixed_precision"
    )
    mixed_precision_policy: Any = setting(
        None, "torch's own policy object, instead of dtypes", code_only=True
    )
    cpu_offload: bool | Any = setting(
        False,
        "keep parameters, gradients and optimizer state in host memory",
        flags=("fsdp_offload_params",),
    )
    cpu_offload_pin_memory: bool = setting(
        True, "pin the host memory of offloaded parameters"
    )
    forward_prefetch_depth: int = setting(
        0, "blocks gathered ahead in forward beyond torch's default", minimum=0
    )
    backward_prefetch_depth: int = setting(
        0, "blocks gathered ahead in backward beyond torch's default", minimum=0
    )
    state_dict_type: Literal["SHARDED_STATE_DICT", "FULL_STATE_DICT"] = setting(
        "SHARDED_STATE_DICT", "form of checkpoints written by save_state"
    )
    cpu_ram_efficient_loading: bool = setting(
        False, "only rank 0 builds the model with weights; others get their shards"
    )
    param_init_fn: Callable[..., None] | None = setting(
        None, "fills modules built on the meta device", code_only=True
    )
    activation_checkpointing: bool = setting(
        False, "recompute activations of wrapped blocks in backward"
    )
    activation_checkpointing_offload: bool = setting(
        False, "keep recompute inputs in host memory"
    )
    sync_module_states: bool = setting(
        True, "broadcast rank 0's parameters and buffers before training"
    )
