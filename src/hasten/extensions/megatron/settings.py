"""Settings of Megatron-LM."""

from collections.abc import Callable, Mapping
from typing import Any, Final, Literal

from hasten.config.base import Absent, Section, SectionNames, setting, settings

_SUPPORTED: Final = (
    "tp_degree",
    "pp_degree",
    "num_micro_batches",
    "sequence_parallelism",
    "gradient_clipping",
    "recompute_activations",
    "recompute_granularity",
    "recompute_method",
    "recompute_num_layers",
    "decoder_last_pipeline_num_layers",
    "attention_backend",
    "attention_dropout",
    "hidden_dropout",
    "attention_softmax_in_fp32",
    "seq_length",
    "use_distributed_optimizer",
    "return_logits",
)
"""Options that have an effect."""


@settings
class MegatronLMPlugin(Section):
    """Options of Megatron-LM."""

    section_names = SectionNames(
        argument="megatron_lm_plugin",
        strategy="megatron",
        rules="hasten.extensions.megatron.rules:RULES",
        flag_prefix="megatron_lm_",
        flag_group="Megatron-LM",
    )
    absent = (
        Absent(
            "context_parallel_size",
            "context parallelism with Megatron",
            "use cp_size with strategy: fsdp",
        ),
        *(
            Absent(
                name,
                "expert parallelism with Megatron",
                "use ep_size with strategy: fsdp",
            )
            for name in ("expert_model_parallel_size", "expert_tensor_parallel_size")
        ),
        Absent(
            "use_rotary_position_embeddings",
            "a choice of position embeddings",
            "the model's configuration says it already; leave it out",
        ),
        Absent(
            "num_layers_per_virtual_pipeline_stage",
            "an interleaved schedule of Megatron",
            "leave it out for one stage per rank, or use pp_size with strategy: fsdp",
        ),
        Absent(
            "pipeline_model_parallel_split_rank",
            "a pipeline through encoder and decoder",
            "only decoders have a pipeline; leave it out",
        ),
        *(
            Absent(
                name,
                "sharding parameters or offloading optimizer state with Megatron",
                "use_distributed_optimizer shards masters and moments, and strategy: fsdp shards optimizer, gradients and parameters",
            )
            for name in (
                "use_custom_fsdp",
                "use_precision_aware_optimizer",
                "optimizer_cpu_offload",
                "overlap_cpu_optimizer_d2h_h2d",
            )
        ),
        Absent(
            "attention_backend",
            "attention by Transformer Engine",
            "leave it out to use Megatron's own",
            values=("flash", "fused"),
        ),
        Absent(
            "",
            "running Megatron-LM's own training loop, data and schedules",
            "the loop's optimizer, scheduler, loader and loss say it already; leave it out",
            but=_SUPPORTED,
        ),
    )

    tp_degree: int = setting(1, "tensor parallel size", minimum=1)
    pp_degree: int = setting(1, "pipeline parallel size", minimum=1)
    num_micro_batches: int = setting(1, "micro-batches per step", minimum=1)
    sequence_parallelism: bool = setting(
        False, "shard norms and dropouts along the sequence"
    )
    context_parallel_size: int = setting(1, "context parallel size", minimum=1)
    expert_model_parallel_size: int = setting(1, "expert parallel size", minimum=1)
    expert_tensor_parallel_size: int | None = setting(
        None, "tensor parallel size inside experts", minimum=1
    )
    gradient_clipping: float | None = setting(
        None, "gradient norm Megatron clips to (0 = off)", minimum=0
    )
    use_distributed_optimizer: bool = setting(
        False, "shard the optimizer state over data-parallel ranks"
    )
    use_custom_fsdp: bool = setting(False, "Megatron's own FSDP")
    use_precision_aware_optimizer: bool = setting(
        False, "optimizer states in lower precision"
    )
    optimizer_cpu_offload: bool = setting(False, "optimizer state in host memory")
    overlap_cpu_optimizer_d2h_h2d: bool = setting(
        False, "overlap copies of the offloaded optimizer"
    )
    recompute_activations: bool = setting(False, "recompute attention in backward")
    recompute_granularity: Literal["full", "selective"] | None = setting(
        None, "what is recomputed"
    )
    recompute_method: Literal["uniform", "block"] | None = setting(
        None, "how layers are chosen for full recompute"
    )
    recompute_num_layers: int | None = setting(
        None, "layers per recompute unit", minimum=1
    )
    num_layers_per_virtual_pipeline_stage: int | None = setting(
        None, "layers per virtual stage (interleaving)", minimum=1
    )
    decoder_last_pipeline_num_layers: int | None = setting(
        None, "layers of the last stage, when uneven", minimum=1
    )
    pipeline_model_parallel_split_rank: int | None = setting(
        None, "rank between encoder and decoder", minimum=0
    )
    attention_backend: Literal["flash", "fused", "unfused", "local", "auto"] | None = (
        setting(None, "attention kernel")
    )
    attention_dropout: float | None = setting(
        None, "dropout after attention", minimum=0
    )
    hidden_dropout: float | None = setting(None, "dropout of hidden states", minimum=0)
    attention_softmax_in_fp32: bool = setting(False, "softmax in fp32")
    calculate_per_token_loss: bool = setting(False, "scale the loss by tokens")
    use_rotary_position_embeddings: bool = setting(False, "rotary positions")
    eod_mask_loss: bool = setting(False, "mask the loss of end-of-document tokens")
    no_load_optim: bool = setting(False, "do not load the optimizer")
    no_save_optim: bool = setting(False, "do not save the optimizer")
    is_train_batch_min: bool = setting(
        True, "take the smallest loader's batch size when several are prepared"
    )
    train_iters: int | None = setting(None, "steps in total", minimum=1)
    train_samples: int | None = setting(None, "samples in total", minimum=1)
    weight_decay_incr_style: Literal["constant", "linear", "cosine"] = setting(
        "constant", "how weight decay grows"
    )
    start_weight_decay: float | None = setting(None, "first weight decay", minimum=0)
    end_weight_decay: float | None = setting(None, "last weight decay", minimum=0)
    lr_decay_style: Literal[
        "constant", "linear", "cosine", "inverse-square-root", "WSD"
    ] = setting("linear", "learning rate decay")
    lr_decay_iters: int | None = setting(None, "steps of decay", minimum=1)
    lr_decay_samples: int | None = setting(None, "samples of decay", minimum=1)
    lr_warmup_iters: int | None = setting(None, "steps of warm-up", minimum=0)
    lr_warmup_samples: int | None = setting(None, "samples of warm-up", minimum=0)
    lr_warmup_fraction: float | None = setting(
        None, "fraction of decay spent warming up", minimum=0
    )
    min_lr: float = setting(0.0, "smallest learning rate", minimum=0)
    consumed_samples: tuple[int, ...] | None = setting(
        None, "samples consumed by train, valid, test loaders"
    )
    no_wd_decay_cond: Callable[..., bool] | None = setting(
        None, "parameters without weight decay", code_only=True
    )
    scale_lr_cond: Callable[..., bool] | None = setting(
        None, "parameters with a scaled learning rate", code_only=True
    )
    lr_mult: float = setting(1.0, "factor of the scaled learning rate", minimum=0)
    megatron_dataset_flag: bool = setting(
        False, "data comes from Megatron's own datasets"
    )
    seq_length: int | None = setting(None, "sequence length", minimum=1)
    encoder_seq_length: int | None = setting(None, "encoder sequence length", minimum=1)
    decoder_seq_length: int | None = setting(None, "decoder sequence length", minimum=1)
    tensorboard_dir: str | None = setting(
        None, "folder of Megatron's TensorBoard log", path=True
    )
    set_all_logging_options: bool = setting(
        False, "switch on all of Megatron's logging"
    )
    eval_iters: int = setting(100, "steps of an evaluation", minimum=0)
    eval_interval: int = setting(1000, "steps between evaluations", minimum=1)
    return_logits: bool = setting(False, "return logits besides the loss")
    custom_train_step_class: Any = setting(
        None, "your train step class", code_only=True
    )
    custom_train_step_kwargs: Mapping[str, Any] | None = setting(
        None, "its arguments", code_only=True
    )
    custom_model_provider_function: Callable[..., Any] | None = setting(
        None, "your model provider", code_only=True
    )
    custom_prepare_model_function: Callable[..., Any] | None = setting(
        None, "your model preparation", code_only=True
    )
    custom_megatron_datasets_provider_function: Callable[..., Any] | None = setting(
        None, "your datasets", code_only=True
    )
    custom_get_batch_function: Callable[..., Any] | None = setting(
        None, "your batch function", code_only=True
    )
    custom_loss_function: Callable[..., Any] | None = setting(
        None, "your loss function", code_only=True
    )
    other_megatron_args: Mapping[str, Any] | None = setting(
        None, "further Megatron arguments, passed as they are"
    )

    def mesh_degrees(self) -> Mapping[str, int]:
        return {"pp": self.pp_degree, "tp": self.tp_degree}
