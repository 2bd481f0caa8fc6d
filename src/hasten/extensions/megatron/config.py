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


def translate(
    plugin: MegatronLMPlugin, facts: ModelFacts, mixed_precision: str
) -> EngineArguments:
    """Return the keywords of the engine's classes.

    Raises: ConfigError for settings that contradict the model or each other.
    """
    _check(plugin, facts)
    half = {"bf16": "bfloat16"}.get(mixed_precision)
    if half is None and mixed_precision != "no":
        raise ConfigError(
            f"mixed_precision={mixed_precision!r} is not supported in this version with strategy='megatron', and another precision "
            "would change the results; use 'bf16' or 'no'."
        )
    lean = facts.family != "gpt2"  # no biases, and RMSNorm
    granularity = plugin.recompute_granularity or (
        "selective" if plugin.recompute_activations else None
    )
    full = granularity == "full"
    transformer = {
        "num_layers": facts.layers,
        "hidden_size": facts.hidden,
        "num_attention_heads": facts.heads,
        "num_query_groups": facts.groups,
        "kv_channels": facts.head_dim,
        "ffn_hidden_size": facts.ffn,
        "layernorm_epsilon": facts.epsilon,
        "normalization": "RMSNorm" if lean else "LayerNorm",
        "gated_linear_unit": facts.gated,
        "add_bias_linear": not lean,
        "activation_func": facts.activation,
        "init_method_std": facts.init_std,
        "hidden_dropout": _setting_or(plugin.hidden_dropout, facts.hidden_dropout),
        "attention_dropout": _setting_or(
            plugin.attention_dropout, facts.attention_dropout
        ),
        "attention_softmax_in_fp32": plugin.attention_softmax_in_fp32,
        "attention_backend": plugin.attention_backend or "auto",
        "tensor_model_parallel_size": plugin.tp_degree,
        "pipeline_model_parallel_size": plugin.pp_degree,
        "sequence_parallel": plugin.sequence_parallelism,
        "num_layers_in_last_pipeline_stage": plugin.decoder_last_pipeline_num_layers,
        "recompute_granularity": granularity,
        "recompute_method": (plugin.recompute_method or "uniform") if full else None,
        "recompute_num_layers": (plugin.recompute_num_layers or 1) if full else None,
        "bf16": half is not None,
        "params_dtype": half or "float32",
        "pipeline_dtype": half or "float32",
        "autocast_dtype": half or "float32",
    }
    return EngineArguments(transformer, _model(plugin, facts))


# Any: numbers, strings and flags
def _model(plugin: MegatronLMPlugin, facts: ModelFacts) -> dict[str, Any]:
    ranks = plugin.tp_degree
    keywords: dict[str, Any] = {
        "vocab_size": -(-facts.vocab // ranks) * ranks,
        "max_sequence_length": facts.positions,
        "share_embeddings_and_output_weights": facts.tied,
    }
    match facts.family:
        case "gpt2":
            return keywords | {"position_embedding_type": "learned_absolute"}
        case "llama":
            return keywords | {
                "position_embedding_type": "rope",
                "rotary_base": facts.rope_base,
            }
        case other:
            assert_never(other)


def _setting_or(setting: float | None, default: float) -> float:
    return default if setting is None else setting


def _check(plugin: MegatronLMPlugin, facts: ModelFacts) -> None:
    for name, count in (
        ("heads", facts.heads),
        ("key-value heads", facts.groups),
        ("inner size", facts.ffn),
    ):
        if count % plugin.tp_degree:
            raise ConfigError(
                f"megatron.tp_degree={plugin.tp_degree} does not divide the model's {count} {name}, so ranks would hold parts of "
                f"different size; set tp_degree to a divisor of {count}."
            )
    last = plugin.decoder_last_pipeline_num_layers
    if last is not None and plugin.pp_degree == 1:
        raise ConfigError(
            f"megatron.decoder_last_pipeline_num_layers={last} has no effect with pp_degree=1; leave it out, or raise pp_degree."
        )
    stages, layers = (
        (plugin.pp_degree, facts.layers)
        if last is None
        else (plugin.pp_degree - 1, facts.layers - last)
    )
    if layers % stages or layers < stages:
        raise ConfigError(
            f"megatron.pp_degree={plugin.pp_degree} divides the model's {facts.layers} layers into stages of different size; set "
            "pp_degree to a divisor, or decoder_last_pipeline_num_layers to the number of layers of the last stage."
        )
    if plugin.sequence_parallelism and plugin.tp_degree == 1:
        raise ConfigError(
            "megatron.sequence_parallelism=True shards sequences over tensor parallel ranks, but tp_degree=1; increase tp_degree, or "
            "remove it."
        )
    full = plugin.recompute_granularity == "full"
    for field, value in (
        ("recompute_method", plugin.recompute_method),
        ("recompute_num_layers", plugin.recompute_num_layers),
    ):
        if value is not None and not full:
            raise ConfigError(
                f"megatron.{field}={value!r} selects layers for full recompute, but recompute_granularity is "
                f"{plugin.recompute_granularity!r}, so it would have no effect; set recompute_granularity='full', or remove it."
            )
    if plugin.recompute_activations and full:
        raise ConfigError(
            "megatron.recompute_activations=True recomputes attention only, and recompute_granularity='full' whole layers; keep one."
        )
