"""What a Megatron engine is built with, from the settings of the run and the Hub's configuration of the model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

from hasten.config.engines import MegatronLMPlugin
from hasten.errors import ConfigError, PrepareError

FAMILIES: Final = ("gpt2", "llama")
"""Values of `model_type` in the Hub's configuration that the engine can be built for."""
_GELU: Final = ("gelu_new", "gelu_pytorch_tanh", "gelu", "silu", "relu")


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """The numbers of a decoder-only language model."""

    family: Literal["gpt2", "llama"]
    layers: int
    hidden: int
    heads: int
    groups: int
    """Heads of keys and values."""
    head_dim: int
    ffn: int
    vocab: int
    positions: int
    epsilon: float
    activation: str
    tied: bool
    """Input and output embeddings are one tensor."""
    hidden_dropout: float
    attention_dropout: float
    init_std: float
    rope_base: float = 10000.0


@dataclass(frozen=True, slots=True)
class EngineArguments:
    """Keywords of megatron-core's own classes; functions and dtypes by name."""

    transformer: Mapping[str, Any]  # Any: numbers, words and switches
    model: Mapping[str, Any]


def model_facts(config: Any) -> ModelFacts:  # Any: a configuration of transformers
    """The numbers of the model that a configuration of the Hub describes.

    Raises: PrepareError for an architecture, or a variant of one, that would be computed differently.
    """
    kind = getattr(config, "model_type", None)
    if kind not in FAMILIES:
        raise PrepareError(
            f"strategy='megatron' was given a model of type {kind!r}, and the engine's own layers take its place, so that only known "
            f"architectures can be trained: {', '.join(FAMILIES)}, as transformers builds them. Use strategy='fsdp' for others."
        )
    facts = _gpt2(config) if kind == "gpt2" else _llama(config)
    if facts.activation not in _GELU:
        raise _variant(kind, "activation", facts.activation, f"one of {', '.join(_GELU)}")
    return facts


def _gpt2(config: Any) -> ModelFacts:
    if config.embd_pdrop != config.resid_pdrop:
        raise _variant("gpt2", "embd_pdrop", config.embd_pdrop, f"resid_pdrop ({config.resid_pdrop})")
    for name, wanted in (
        ("scale_attn_weights", True),
        ("scale_attn_by_inverse_layer_idx", False),
        ("reorder_and_upcast_attn", False),
        ("add_cross_attention", False),
    ):
        if getattr(config, name, wanted) != wanted:
            raise _variant("gpt2", name, getattr(config, name), str(wanted))
    return ModelFacts(
        family="gpt2",
        layers=config.n_layer,
        hidden=config.n_embd,
        heads=config.n_head,
        groups=config.n_head,
        head_dim=config.n_embd // config.n_head,
        ffn=config.n_inner or 4 * config.n_embd,
        vocab=config.vocab_size,
        positions=config.n_positions,
        epsilon=config.layer_norm_epsilon,
        activation=config.activation_function,
        tied=bool(config.tie_word_embeddings),
        hidden_dropout=config.resid_pdrop,
        attention_dropout=config.attn_pdrop,
        init_std=config.initializer_range,
    )


def _llama(config: Any) -> ModelFacts:
    rope: Any = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind != "default":
        raise _variant("llama", "rope_type", kind, "'default'")
    for name in ("attention_bias", "mlp_bias"):
        if getattr(config, name, False):
            raise _variant("llama", name, True, "False")
    return ModelFacts(
        family="llama",
        layers=config.num_hidden_layers,
        hidden=config.hidden_size,
        heads=config.num_attention_heads,
        groups=config.num_key_value_heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        ffn=config.intermediate_size,
        vocab=config.vocab_size,
        positions=config.max_position_embeddings,
        epsilon=config.rms_norm_eps,
        activation=config.hidden_act,
        tied=bool(config.tie_word_embeddings),
        hidden_dropout=0.0,
        attention_dropout=getattr(config, "attention_dropout", 0.0),
        init_std=config.initializer_range,
        rope_base=rope.get("rope_theta") or getattr(config, "rope_theta", 10000.0),
    )


def _variant(family: str, name: str, value: object, needed: str) -> PrepareError:
    return PrepareError(
        f"{name}={value!r} of this {family} model has no counterpart in the engine, which would compute something else; it needs "
        f"{needed}. Change it, or use strategy='fsdp'."
    )


def translate(plugin: MegatronLMPlugin, facts: ModelFacts, mixed_precision: str) -> EngineArguments:
    """The engine's own keywords.

    Raises: ConfigError for settings that the model or each other cannot hold.
    """
    _check(plugin, facts)
    half = {"bf16": "bfloat16"}.get(mixed_precision)
    if half is None and mixed_precision != "no":
        raise ConfigError(
            f"mixed_precision={mixed_precision!r} is not in this version with strategy='megatron', and another precision would change "
            "the numbers; use 'bf16' or 'no'."
        )
    llama = facts.family == "llama"
    granularity = plugin.recompute_granularity or ("selective" if plugin.recompute_activations else None)
    full = granularity == "full"
    transformer = {
        "num_layers": facts.layers,
        "hidden_size": facts.hidden,
        "num_attention_heads": facts.heads,
        "num_query_groups": facts.groups,
        "kv_channels": facts.head_dim,
        "ffn_hidden_size": facts.ffn,
        "layernorm_epsilon": facts.epsilon,
        "normalization": "RMSNorm" if llama else "LayerNorm",
        "gated_linear_unit": llama,
        "add_bias_linear": not llama,
        "activation_func": facts.activation,
        "init_method_std": facts.init_std,
        "hidden_dropout": _or(plugin.hidden_dropout, facts.hidden_dropout),
        "attention_dropout": _or(plugin.attention_dropout, facts.attention_dropout),
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


def _model(plugin: MegatronLMPlugin, facts: ModelFacts) -> dict[str, Any]:  # Any: numbers, words and switches
    ranks, llama = plugin.tp_degree, facts.family == "llama"
    return {
        "vocab_size": -(-facts.vocab // ranks) * ranks,
        "max_sequence_length": facts.positions,
        "share_embeddings_and_output_weights": facts.tied,
        "position_embedding_type": "rope" if llama else "learned_absolute",
        "rotary_base": facts.rope_base,
    }


def _or(given: float | None, otherwise: float) -> float:
    return otherwise if given is None else given


def _check(plugin: MegatronLMPlugin, facts: ModelFacts) -> None:
    for name, count in (("heads", facts.heads), ("key-value heads", facts.groups), ("inner size", facts.ffn)):
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
    stages, layers = (plugin.pp_degree, facts.layers) if last is None else (plugin.pp_degree - 1, facts.layers - last)
    if layers % stages or layers < stages:
        raise ConfigError(
            f"megatron.pp_degree={plugin.pp_degree} divides the model's {facts.layers} layers into stages of different size; set "
            "pp_degree to a divisor, or decoder_last_pipeline_num_layers to the number of layers of the last stage."
        )
    if plugin.sequence_parallelism and plugin.tp_degree == 1:
        raise ConfigError(
            "megatron.sequence_parallelism=True shards along the sequence over tensor parallel ranks, and tp_degree=1; raise "
            "tp_degree, or leave it out."
        )
    full = plugin.recompute_granularity == "full"
    for field, value in (
        ("recompute_method", plugin.recompute_method),
        ("recompute_num_layers", plugin.recompute_num_layers),
    ):
        if value is not None and not full:
            raise ConfigError(
                f"megatron.{field}={value!r} chooses layers for full recompute, and recompute_granularity is "
                f"{plugin.recompute_granularity!r}, so nothing would be chosen; set recompute_granularity='full', or leave it out."
            )
    if plugin.recompute_activations and full:
        raise ConfigError(
            "megatron.recompute_activations=True recomputes attention only, and recompute_granularity='full' whole layers; keep one."
        )
