"""Tiny transformers models with random weights, and a short training run of one, plain or with an Accelerator."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Final

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from hasten import Accelerator
from hasten.optional import need

# Any in this file: classes and configurations of transformers, which is an optional package.

BERT_PLAN: Final = MappingProxyType(
    {
        "*.self.query": "colwise",
        "*.self.key": "colwise",
        "*.self.value": "colwise",
        "*.output.dense": "rowwise",
        "*.intermediate.dense": "colwise",
    }
)
GPT2_PLAN: Final = MappingProxyType(
    {
        "*.c_attn": "colwise_gather_output",
        "*.attn.c_proj": "rowwise_split_input",
        "*.c_fc": "colwise",
        "*.mlp.c_proj": "rowwise",
    }
)
GPT_NEO_PLAN: Final = MappingProxyType(
    {
        "*.[qkv]_proj": "colwise",
        "*.out_proj": "rowwise",
        "*.c_fc": "colwise",
        "*.c_proj": "rowwise",
    }
)
T5_PLAN: Final = MappingProxyType(
    {
        "*.[qkv]": "colwise",
        "*.o": "rowwise",
        "*.wi*": "colwise",
        "*.wo": "rowwise",
        "*.relative_attention_bias": "embedding_colwise",
    }
)
"""Tensor-parallel plans of models that carry none."""

_SIZES: Final = (
    ("hidden_size", 8),
    ("intermediate_size", 16),
    ("num_hidden_layers", 2),
    ("num_attention_heads", 4),
    ("vocab_size", 16),
    ("max_position_embeddings", 8),
)
_END_TOKENS: Final = (("bos_token_id", 0), ("eos_token_id", 0))


def _made(model: str, config: str, **options: Any) -> nn.Module:
    package = need("transformers", why="a model of the Hub")
    net: nn.Module = getattr(package, model)(getattr(package, config)(**options))
    return net


def t5(**options: Any) -> nn.Module:
    """Return an encoder-decoder whose first blocks have relative positions for each head."""
    sizes = {
        "d_model": 8,
        "d_kv": 2,
        "d_ff": 16,
        "num_layers": 2,
        "num_heads": 4,
        "vocab_size": 16,
    }
    start_options = {"dropout_rate": 0.0, "decoder_start_token_id": 0}
    return _made(
        "T5ForConditionalGeneration", "T5Config", **sizes, **start_options, **options
    )


def gated_t5() -> nn.Module:
    """Return a T5 of version 1.1."""
    return t5(feed_forward_proj="gated-gelu", tie_word_embeddings=False)


def gpt2() -> nn.Module:
    """Return a model with transposed weights and a joint layer for queries, keys and values."""
    sizes = {"n_embd": 8, "n_layer": 2, "n_head": 4, "vocab_size": 16, "n_positions": 8}
    drops = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
    return _made("GPT2LMHeadModel", "GPT2Config", **sizes, **drops, **dict(_END_TOKENS))


def mixtral() -> nn.Module:
    """Return a mixture of four experts."""
    return _made(
        "MixtralForCausalLM",
        "MixtralConfig",
        **dict(_SIZES),
        num_key_value_heads=4,
        num_local_experts=4,
        **dict(_END_TOKENS),
    )


def llama(key_heads: int = 2) -> nn.Module:
    """Return a model with four query heads and `key_heads` key heads."""
    options = {"num_key_value_heads": key_heads, "attention_bias": True}
    return _made(
        "LlamaForCausalLM",
        "LlamaConfig",
        **dict(_SIZES),
        **options,
        **dict(_END_TOKENS),
    )


def gemma() -> nn.Module:
    """Return a model whose embedding is a special class that scales its rows."""
    options = {"num_key_value_heads": 4, "head_dim": 4}
    return _made(
        "Gemma3ForCausalLM",
        "Gemma3TextConfig",
        **dict(_SIZES),
        **options,
        **dict(_END_TOKENS),
    )


def gpt_neo() -> nn.Module:
    """Return a model whose attention uses its number of heads in shapes."""
    sizes = {
        "hidden_size": 8,
        "num_layers": 2,
        "num_heads": 4,
        "vocab_size": 16,
        "intermediate_size": 16,
    }
    drops = {
        "resid_dropout": 0.0,
        "embed_dropout": 0.0,
        "attention_dropout": 0.0,
        "max_position_embeddings": 8,
    }
    kinds = [[["global", "local"], 1]]
    return _made(
        "GPTNeoForCausalLM",
        "GPTNeoConfig",
        **sizes,
        **drops,
        attention_types=kinds,
        **dict(_END_TOKENS),
    )


def step(
    net: nn.Module,
    optimizer: Any,
    generator: torch.Generator,
    accelerator: Accelerator | None = None,
) -> float:
    """Train on one random batch and return its loss."""
    batch = torch.randint(1, 16, (4, 6), generator=generator)
    loss = net(input_ids=batch, labels=batch).loss
    loss.backward() if accelerator is None else accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.detach())


def train(
    net: nn.Module, accelerator: Accelerator | None = None, steps: int = 4
) -> tuple[nn.Module, list[float]]:
    """Train the trainable parameters; returns the model and its losses. Ranks: every rank of the Accelerator."""
    net.train()
    optimizer: Any = torch.optim.AdamW(
        [p for p in net.parameters() if p.requires_grad], lr=1e-2
    )
    if accelerator is not None:
        net, optimizer = accelerator.prepare(net, optimizer)
    g = torch.Generator().manual_seed(3)
    return net, [step(net, optimizer, g, accelerator) for _ in range(steps)]


def share_of(net: nn.Module) -> float:
    """Return the share of the model's elements that this rank holds."""
    num_local = sum(
        (p.to_local() if isinstance(p, DTensor) else p).numel()
        for p in net.parameters()
    )
    return num_local / sum(p.numel() for p in net.parameters())


def largest_difference(
    actual_state: Mapping[str, Any],
    net: nn.Module,
    but: Callable[[str], bool] = lambda name: False,
) -> float:
    """Return the largest difference between a state dict and a model's, which must have the same names in the same order."""
    expected_state = net.state_dict()
    assert list(actual_state) == list(expected_state), (
        f"names differ: {sorted(set(actual_state) ^ set(expected_state))}"
    )
    floats = {
        name: value
        for name, value in expected_state.items()
        if value.is_floating_point() and not but(name)
    }
    return max(
        float((actual_state[name] - value).abs().max())
        for name, value in floats.items()
    )


def whisper() -> nn.Module:
    """Return an encoder-decoder that reads spectrograms of 16 frames."""
    layers = {
        "encoder_layers": 2,
        "decoder_layers": 2,
        "encoder_attention_heads": 2,
        "decoder_attention_heads": 2,
    }
    sizes = {
        "vocab_size": 16,
        "num_mel_bins": 8,
        "d_model": 8,
        "encoder_ffn_dim": 16,
        "decoder_ffn_dim": 16,
    }
    lengths = {"max_source_positions": 8, "max_target_positions": 16}
    tokens = {
        "pad_token_id": 0,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "decoder_start_token_id": 2,
    }
    return _made(
        "WhisperForConditionalGeneration",
        "WhisperConfig",
        **layers,
        **sizes,
        **lengths,
        **tokens,
    )
