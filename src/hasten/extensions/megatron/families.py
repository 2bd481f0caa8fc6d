"""Architectures that a Megatron engine supports, and their sizes, read from the Hub configuration."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Final, Literal

from hasten.errors import PrepareError

Family = Literal["gpt2", "llama"]
CLASSES: Final = MappingProxyType[str, str](
    {"gpt2": "GPT2LMHeadModel", "llama": "LlamaForCausalLM"}
)
"""Class of transformers that is trained, by `model_type` of the Hub configuration."""
ACTIVATIONS: Final = ("gelu_new", "gelu_pytorch_tanh", "gelu", "silu", "relu")


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Sizes and options of a language model."""

    family: Family
    layers: int
    hidden: int
    heads: int
    groups: int
    """Number of key-value heads."""
    head_dim: int
    ffn: int
    vocab: int
    positions: int
    """Maximum sequence length."""
    epsilon: float
    activation: str
    tied: bool
    """Input and output embeddings share one tensor."""
    hidden_dropout: float
    attention_dropout: float
    init_std: float
    rope_base: float = 10000.0
    gated: bool = False
    """The MLP multiplies its activation by a second projection."""
    fixed_token: int | None = None
    """Token whose input embedding gets no gradient."""


# Any: a configuration of transformers
def model_facts(config: Any, tied: bool | None = None) -> ModelFacts:
    """Return the sizes and options of a model from its Hub configuration; `tied` overrides the configuration's value.

    Raises: PrepareError for an architecture, or a variant of one, that the engine would compute differently.
    """
    model_type: Any = getattr(config, "model_type", None)
    if model_type not in _READERS:
        raise PrepareError(
            f"strategy='megatron' does not support models of type {model_type!r}: the engine replaces a model's layers, so only these "
            f"architectures can be trained: {', '.join(CLASSES)}, as transformers builds them. Use strategy='fsdp' for others."
        )
    facts = _READERS[model_type](config)
    if facts.activation not in ACTIVATIONS:
        raise _variant_error(
            model_type,
            "activation",
            facts.activation,
            f"one of {', '.join(ACTIVATIONS)}",
        )
    if tied is not None:
        facts = replace(facts, tied=tied)
    return facts


def check_class(names: list[str], facts: ModelFacts) -> None:
    """Check that one of `names`, a model's class and its bases, is the class that the engine trains.

    Raises: PrepareError for a model with another head, whose weights the engine cannot hold.
    """
    class_name = CLASSES[facts.family]
    if class_name not in names:
        raise PrepareError(
            f"strategy='megatron' does not support {names[0]}: the engine only builds {facts.family} models with a language model head; "
            f"pass a {class_name}, or use strategy='fsdp'."
        )


def _refuse_other_values(family: str, config: Any, **needed_values: object) -> None:
    """Raise for a value of the configuration that the engine would ignore."""
    for option_name, needed_value in needed_values.items():
        if getattr(config, option_name, needed_value) != needed_value:
            raise _variant_error(
                family, option_name, getattr(config, option_name), str(needed_value)
            )


def _gpt2_facts(config: Any) -> ModelFacts:
    if config.embd_pdrop != config.resid_pdrop:
        raise _variant_error(
            "gpt2",
            "embd_pdrop",
            config.embd_pdrop,
            f"resid_pdrop ({config.resid_pdrop})",
        )
    _refuse_other_values(
        "gpt2",
        config,
        scale_attn_weights=True,
        scale_attn_by_inverse_layer_idx=False,
        reorder_and_upcast_attn=False,
        add_cross_attention=False,
    )
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


def _llama_facts(config: Any) -> ModelFacts:
    rope_options: Any = (
        getattr(config, "rope_parameters", None)
        or getattr(config, "rope_scaling", None)
        or {}
    )
    rope_type = rope_options.get("rope_type", rope_options.get("type", "default"))
    if rope_type != "default":
        raise _variant_error("llama", "rope_type", rope_type, "'default'")
    _refuse_other_values("llama", config, attention_bias=False, mlp_bias=False)
    return ModelFacts(
        family="llama",
        layers=config.num_hidden_layers,
        hidden=config.hidden_size,
        heads=config.num_attention_heads,
        groups=config.num_key_value_heads,
        head_dim=getattr(config, "head_dim", None)
        or config.hidden_size // config.num_attention_heads,
        ffn=config.intermediate_size,
        vocab=config.vocab_size,
        positions=config.max_position_embeddings,
        epsilon=config.rms_norm_eps,
        activation=config.hidden_act,
        tied=bool(config.tie_word_embeddings),
        hidden_dropout=0.0,
        attention_dropout=getattr(config, "attention_dropout", 0.0),
        init_std=config.initializer_range,
        rope_base=rope_options.get("rope_theta")
        or getattr(config, "rope_theta", 10000.0),
        gated=True,
        fixed_token=getattr(config, "pad_token_id", None),
    )


_READERS: Final = MappingProxyType[str, Callable[[Any], ModelFacts]](
    {"gpt2": _gpt2_facts, "llama": _llama_facts}
)


def _variant_error(
    family: str, option_name: str, option_value: object, needed: str
) -> PrepareError:
    return PrepareError(
        f"{option_name}={option_value!r} of this {family} model is not supported by the engine, which would compute a different result; it needs "
        f"{needed}. Change it, or use strategy='fsdp'."
    )
