"""Keywords of megatron-core's classes, from the settings of the run and the Hub configuration of the model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, assert_never

from hasten.errors import ConfigError
from hasten.extensions.megatron.families import ModelFacts
from hasten.extensions.megatron.settings import MegatronLMPlugin


@dataclass(frozen=True, slots=True)
class EngineArguments:
    """Keywords of megatron-core's classes; functions and dtypes by name."""

    transformer: Mapping[str, Any]  # Any: numbers, strings and flags
    model: Mapping[str, Any]


def make_engine_settings(
    plugin: MegatronLMPlugin, model_facts: ModelFacts, mixed_precision: str
) -> EngineArguments:
    """Return the keywords of the engine's classes.

    Raises: ConfigError for settings that contradict the model or each other.
    """
    _check_settings(plugin, model_facts)
    half_dtype = {"bf16": "bfloat16"}.get(mixed_precision)
    if half_dtype is None and mixed_precision != "no":
        raise ConfigError(
            f"mixed_precision={mixed_precision!r} is not supported in this version with strategy='megatron', and another precision "
            "would change the results; use 'bf16' or 'no'."
        )
    is_llama = model_facts.family != "gpt2"  # no biases, and RMSNorm
    granularity = plugin.recompute_granularity
    if plugin.recompute_activations:
        granularity = granularity or "selective"
    is_full_recompute = granularity == "full"
    recompute_method = recompute_num_layers = None
    if is_full_recompute:
        recompute_method = plugin.recompute_method or "uniform"
        recompute_num_layers = plugin.recompute_num_layers or 1
    transformer = {
        "num_layers": model_facts.layers,
        "hidden_size": model_facts.hidden,
        "num_attention_heads": model_facts.heads,
        "num_query_groups": model_facts.groups,
        "kv_channels": model_facts.head_dim,
        "ffn_hidden_size": model_facts.ffn,
        "layernorm_epsilon": model_facts.epsilon,
        "normalization": "RMSNorm" if is_llama else "LayerNorm",
        "gated_linear_unit": model_facts.gated,
        "add_bias_linear": not is_llama,
        "activation_func": model_facts.activation,
        "init_method_std": model_facts.init_std,
        "hidden_dropout": _setting_or(
            plugin.hidden_dropout, model_facts.hidden_dropout
        ),
        "attention_dropout": _setting_or(
            plugin.attention_dropout, model_facts.attention_dropout
        ),
        "attention_softmax_in_fp32": plugin.attention_softmax_in_fp32,
        "attention_backend": plugin.attention_backend or "auto",
        "tensor_model_parallel_size": plugin.tp_degree,
        "pipeline_model_parallel_size": plugin.pp_degree,
        "sequence_parallel": plugin.sequence_parallelism,
        "num_layers_in_last_pipeline_stage": plugin.decoder_last_pipeline_num_layers,
        "recompute_granularity": granularity,
        "recompute_method": recompute_method,
        "recompute_num_layers": recompute_num_layers,
        "bf16": half_dtype is not None,
        "params_dtype": half_dtype or "float32",
        "pipeline_dtype": half_dtype or "float32",
        "autocast_dtype": half_dtype or "float32",
    }
    return EngineArguments(transformer, _model_keywords(plugin, model_facts))


# Any: numbers, strings and flags
def _model_keywords(
    plugin: MegatronLMPlugin, model_facts: ModelFacts
) -> dict[str, Any]:
    tp_ranks = plugin.tp_degree
    keywords: dict[str, Any] = {
        "vocab_size": -(-model_facts.vocab // tp_ranks) * tp_ranks,
        "max_sequence_length": model_facts.positions,
        "share_embeddings_and_output_weights": model_facts.tied,
    }
    match model_facts.family:
        case "gpt2":
            return keywords | {"position_embedding_type": "learned_absolute"}
        case "llama":
            return keywords | {
                "position_embedding_type": "rope",
                "rotary_base": model_facts.rope_base,
            }
        case other:
            assert_never(other)


def _setting_or(setting: float | None, default: float) -> float:
    return default if setting is None else setting


def _check_settings(plugin: MegatronLMPlugin, model_facts: ModelFacts) -> None:
    for name, part_count in (
        ("heads", model_facts.heads),
        ("key-value heads", model_facts.groups),
        ("inner size", model_facts.ffn),
    ):
        if part_count % plugin.tp_degree:
            raise ConfigError(
                f"megatron.tp_degree={plugin.tp_degree} does not divide the model's {part_count} {name}, so ranks would hold parts of "
                f"different size; set tp_degree to a divisor of {part_count}."
            )
    last_stage_layers = plugin.decoder_last_pipeline_num_layers
    if last_stage_layers is not None and plugin.pp_degree == 1:
        raise ConfigError(
            f"megatron.decoder_last_pipeline_num_layers={last_stage_layers} has no effect with pp_degree=1; leave it out, or raise pp_degree."
        )
    if last_stage_layers is None:
        num_stages = plugin.pp_degree
        num_layers = model_facts.layers
    else:
        num_stages = plugin.pp_degree - 1
        num_layers = model_facts.layers - last_stage_layers
    if num_layers % num_stages or num_layers < num_stages:
        raise ConfigError(
            f"megatron.pp_degree={plugin.pp_degree} divides the model's {model_facts.layers} layers into stages of different size; set "
            "pp_degree to a divisor, or decoder_last_pipeline_num_layers to the number of layers of the last stage."
        )
    if plugin.sequence_parallelism and plugin.tp_degree == 1:
        raise ConfigError(
            "megatron.sequence_parallelism=True shards sequences over tensor parallel ranks, but tp_degree=1; increase tp_degree, or "
            "remove it."
        )
    is_full_recompute = plugin.recompute_granularity == "full"
    for setting_name, setting_value in (
        ("recompute_method", plugin.recompute_method),
        ("recompute_num_layers", plugin.recompute_num_layers),
    ):
        if setting_value is not None and not is_full_recompute:
            raise ConfigError(
                f"megatron.{setting_name}={setting_value!r} selects layers for full recompute, but recompute_granularity is "
                f"{plugin.recompute_granularity!r}, so it would have no effect; set recompute_granularity='full', or remove it."
            )
    if plugin.recompute_activations and is_full_recompute:
        raise ConfigError(
            "megatron.recompute_activations=True recomputes attention only, and recompute_granularity='full' whole layers; keep one."
        )
