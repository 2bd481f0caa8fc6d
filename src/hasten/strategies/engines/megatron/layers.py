"""Layers of a Megatron engine: megatron-core's specs, with torch's norms and the specifics of each family."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from types import MappingProxyType
from typing import Any, Final

from torch import Tensor, nn
from torch.nn import functional

from hasten.strategies.engines.megatron.attention import CoreAttention
from hasten.strategies.engines.megatron.package import package

# Any in this file: megatron-core is untyped.


def _tanh_gelu(x: Tensor) -> Tensor:
    return functional.gelu(x, approximate="tanh")


ACTIVATION: Final = MappingProxyType[str, Callable[[Tensor], Tensor]](
    {
        "gelu_new": _tanh_gelu,
        "gelu_pytorch_tanh": _tanh_gelu,
        "gelu": functional.gelu,
        "silu": functional.silu,
        "relu": functional.relu,
    }
)


def _norm(config: Any, hidden_size: int, eps: float) -> nn.Module:
    """Return a norm of torch; its gradients are summed over shards of a sequence."""
    kind = nn.RMSNorm if config.normalization == "RMSNorm" else nn.LayerNorm
    made = kind(hidden_size, eps=eps, dtype=config.params_dtype)
    for parameter in made.parameters():
        parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
    return made


class Norm(nn.Module):
    """Norm for layer specs, which need a class; creates a norm of torch."""

    def __new__(cls, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> Any:
        return _norm(config, hidden_size, eps)


class Dropout(nn.Module):
    """Dropout of values that are sharded over tensor-parallel ranks, with random numbers that differ between ranks."""

    def __init__(self, probability: float) -> None:
        super().__init__()
        self.probability = probability

    def forward(self, x: Tensor) -> Tensor:
        if not self.probability or not self.training:
            return x
        with package("tensor_parallel").get_cuda_rng_tracker().fork():
            return functional.dropout(x, self.probability)


class NormDropout(nn.Module):
    """Final norm of a stack with dropout after it, as in T5."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__()
        self.norm = _norm(config, hidden_size, eps)
        divided = config.sequence_parallel
        self.dropout = Dropout(config.hidden_dropout) if divided else nn.Dropout(config.hidden_dropout)

    def forward(self, x: Tensor) -> Tensor:
        dropped: Tensor = self.dropout(self.norm(x))
        return dropped


class NormAfterAdd(nn.Module):
    """Residual addition with a norm after it, as in BERT; megatron-core's layers normalise before."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.norm = _norm(config, config.hidden_size, config.layernorm_epsilon)

    def forward(self, training: bool, fused: bool) -> Callable[..., Tensor]:
        add = package("fusions.fused_bias_dropout").get_bias_dropout_add(training, fused)

        def added(out: Any, residual: Tensor, probability: float) -> Tensor:
            made: Tensor = self.norm(add(out, residual, probability))
            return made

        return added


class InnerDropout(nn.Module):
    """Activation with dropout after it, as in T5's MLPs."""

    def __init__(self, activation: Callable[[Tensor], Tensor], probability: float) -> None:
        super().__init__()
        self._activation, self.dropout = activation, Dropout(probability)

    def forward(self, x: Tensor) -> Tensor:
        dropped: Tensor = self.dropout(self._activation(x))
        return dropped


def decoder_layers(config: Any, number: int) -> Any:
    """Return the spec of a rank's layers of a decoder-only model, with experts if the configuration has them."""
    specs = package("models.gpt.gpt_layer_specs")
    layer = specs.get_gpt_layer_local_spec(normalization=config.normalization, num_experts=config.num_moe_experts)
    layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = Norm
    if config.num_moe_experts is not None:
        layer.submodules.mlp.submodules.router = _router()
    if config.context_parallel_size > 1:
        layer.submodules.self_attention.submodules.core_attention = CoreAttention
    return _block(layer, number, Norm)


@cache  # the class, not an instance: its base class is imported late
def _router() -> Any:
    """Return a router class without Transformer Engine, which the router of megatron-core 0.16 always needs."""
    base: Any = package("transformer.moe.router").TopKRouter

    class Router(base):  # type: ignore[misc]  # megatron-core is untyped
        """Router that scores experts with a plain linear layer."""

        def gating(self, input: Tensor) -> Tensor:
            return functional.linear(input, self.weight)

    return Router


def bert_layers(config: Any, number: int) -> Any:
    """Return the spec of a rank's layers of BERT, which normalises after each residual and not at the end."""
    layer = copy.deepcopy(package("models.bert.bert_layer_specs").bert_layer_local_spec)
    spec = package("transformer.spec_utils").ModuleSpec
    nothing = package("transformer.identity_op").IdentityOp
    layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = nothing
    layer.submodules.self_attn_bda = layer.submodules.mlp_bda = spec(module=NormAfterAdd, params={"config": config})
    return _block(layer, number, None)


def t5_layers(number: int, decodes: bool) -> Any:
    """Return the spec of T5's encoder or decoder, whose attention takes a bias of relative positions."""
    specs = package("models.T5.t5_spec")
    layer = specs.decoder_model_with_local_spec() if decodes else specs.encoder_model_with_local_spec()
    parts = layer.submodules
    parts.input_layernorm = parts.pre_mlp_layernorm = Norm
    parts.self_attention.submodules.core_attention = CoreAttention
    if decodes:
        parts.pre_cross_attn_layernorm = Norm
        parts.cross_attention.submodules.core_attention = CoreAttention
    return _block(layer, number, NormDropout)


def _block(layer: Any, number: int, last: Any) -> Any:
    return package("transformer.transformer_block").TransformerBlockSubmodules(
        layer_specs=[layer] * number, layer_norm=last
    )


@contextmanager
def head_norm() -> Iterator[None]:
    """Context manager in which BERT's head gets a norm of torch; megatron-core's needs Apex for sharded sequences."""
    head = package("models.bert.bert_lm_head")
    before, head.LNImpl = head.LNImpl, Norm
    try:
        yield
    finally:
        head.LNImpl = before
