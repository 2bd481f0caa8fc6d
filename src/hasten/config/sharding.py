"""Settings of sharded data parallel (FSDP2)."""

from collections.abc import Callable
from typing import Any, Literal

from hasten.config.base import Section, setting, settings

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

    reshard_after_forward: bool | int = setting(
        True, "free gathered parameters after forward (an integer reshards to that many ranks)"
    )
    hybrid_shard: bool = setting(False, "shard inside each machine, replicate across machines (HSDP)")
    auto_wrap_policy: WrapPolicy | Callable[..., Any] = setting("auto", "which modules are sharded on their own")
    transformer_cls_names_to_wrap: tuple[str, ...] | None = setting(
        None, "class names of blocks sharded on their own", flags=("fsdp_transformer_layer_cls_to_wrap",)
    )
    min_num_params: int | None = setting(None, "smallest module sharded on its own, in parameters", minimum=0)
    ignored_modules: str | tuple[Any, ...] | None = setting(
        None, "modules left whole: a regular expression over names, or the modules"
    )
    dtypes: FSDPMixedPrecision = setting(factory=FSDPMixedPrecision, help="dtypes; default follows mixed_precision")
    mixed_precision_policy: Any = setting(None, "torch's own policy object, instead of dtypes", code_only=True)
    cpu_offload: bool | Any = setting(
        False, "keep parameters, gradients and optimizer state in host memory", flags=("fsdp_offload_params",)
    )
    cpu_offload_pin_memory: bool = setting(True, "pin the host memory of offloaded parameters")
    forward_prefetch_depth: int = setting(0, "blocks gathered ahead in forward beyond torch's default", minimum=0)
    backward_prefetch_depth: int = setting(0, "blocks gathered ahead in backward beyond torch's default", minimum=0)
    state_dict_type: Literal["SHARDED_STATE_DICT", "FULL_STATE_DICT"] = setting(
        "SHARDED_STATE_DICT", "form of checkpoints written by save_state"
    )
    cpu_ram_efficient_loading: bool = setting(
        False, "only rank 0 builds the model with weights; others get their shards"
    )
    param_init_fn: Callable[..., None] | None = setting(None, "fills modules built on the meta device", code_only=True)
    activation_checkpointing: bool = setting(False, "recompute activations of wrapped blocks in backward")
    activation_checkpointing_offload: bool = setting(False, "keep recompute inputs in host memory")
    sync_module_states: bool = setting(True, "broadcast rank 0's parameters and buffers before training")
