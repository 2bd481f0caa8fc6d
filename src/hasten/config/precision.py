"""Settings of numbers: mixed precision, loss scaling and fp8 recipes."""

from collections.abc import Callable
from typing import Any, Literal

from hasten.config.base import Section, setting, settings

PrecisionType = Literal["no", "fp16", "bf16", "fp8"]
MasterWeights = Literal["fp32", "keep"]


@settings
class AutocastKwargs(Section):
    """Options of autocast."""

    enabled: bool = setting(True, "cast inside the model's forward and autocast()")
    cache_enabled: bool | None = setting(None, "keep cast weights within one forward (default: torch's choice)")
    output_dtype: Literal["fp32", "keep"] = setting("fp32", "dtype of a prepared model's float outputs")


@settings
class GradScalerKwargs(Section):
    """Options of dynamic loss scaling under fp16."""

    init_scale: float = setting(65536.0, "first scale of the loss", minimum=0)
    growth_factor: float = setting(2.0, "factor after growth_interval steps without overflow", minimum=1)
    backoff_factor: float = setting(0.5, "factor after an overflow", minimum=0)
    growth_interval: int = setting(2000, "steps without overflow before the scale grows", minimum=1)
    enabled: bool = setting(True, "scale the loss under fp16")
    max_skipped_steps: int | None = setting(
        50, "updates skipped in a row after which training stops with an error (none: go on)", minimum=1
    )


@settings
class AORecipeKwargs(Section):
    """fp8 through torchao."""

    config: Any = setting(None, "a torchao Float8LinearConfig", code_only=True)
    recipe_name: Literal["tensorwise", "rowwise", "rowwise_with_gw_hp"] | None = setting(None, "a named torchao recipe")
    module_filter_func: Callable[..., bool] | None = setting(None, "which linear layers are converted", code_only=True)
    skip_first_and_last: bool = setting(True, "leave the first and the last linear layer in high precision")
    pad_inner_dim: bool = setting(True, "pad inner dimensions that are not multiples of 16")
    enable_fsdp_float8_all_gather: bool = setting(True, "gather FSDP2 shards in fp8")


@settings
class TERecipeKwargs(Section):
    """fp8 through NVIDIA Transformer Engine."""

    use_autocast_during_eval: bool = setting(False, "fp8 in evaluation too")
    margin: int = setting(0, "margin of the scaling factor")
    interval: int = setting(1, "steps between two recomputations of the scaling factor", minimum=1)
    fp8_format: Literal["HYBRID", "E4M3", "E5M2"] = setting("HYBRID", "number format", flag="fp8_format")
    amax_history_len: int = setting(1024, "length of the history of maxima", minimum=1)
    amax_compute_algo: Literal["max", "most_recent"] = setting("most_recent", "how a maximum is taken from the history")
    override_linear_precision: tuple[bool, bool, bool] = setting(
        (False, False, False), "compute fprop, dgrad, wgrad in high precision"
    )
    use_mxfp8_block_scaling: bool = setting(False, "MXFP8 block scaling (Blackwell)")


@settings
class FP8Config(Section):
    """Which fp8 implementation, and its recipe."""

    backend: Literal["auto", "ao", "te"] = setting("auto", "torchao or Transformer Engine (auto: the installed one)")
    ao: AORecipeKwargs = setting(factory=AORecipeKwargs, help="recipe of torchao", prefix="fp8_")
    te: TERecipeKwargs = setting(factory=TERecipeKwargs, help="recipe of Transformer Engine", prefix="fp8_")
