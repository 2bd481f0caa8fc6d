"""This rank's part of a model as megatron-core's own classes build it: GPTModel, BertModel, T5Model."""

from __future__ import annotations

from collections import OrderedDict
from functools import cache
from typing import Any, assert_never

import torch
from torch import Tensor, nn

from hasten.strategies.engines.megatron.config import EngineArguments
from hasten.strategies.engines.megatron.families import ModelFacts
from hasten.strategies.engines.megatron.layers import (
    ACTIVATION,
    InnerDropout,
    Norm,
    bert_layers,
    decoder_layers,
    head_norm,
    t5_layers,
)
from hasten.strategies.engines.megatron.package import package

# Any in this file: megatron-core is untyped.


def chunk_of(made: EngineArguments, facts: ModelFacts, config: Any, encoder: Any) -> nn.Module:
    """The layers of this pipeline stage; `encoder` is the configuration of an encoder beside the decoder. Ranks: every rank."""
    chunk: Any = _chunk(made, facts, config, encoder)
    if chunk.pre_process and facts.fixed_token is not None:
        chunk.embedding.word_embeddings.register_forward_hook(_Fixed(facts.fixed_token))
    built: nn.Module = chunk
    return built


class _Fixed:
    """Keeps the gradient of one token's embedding at zero, as torch does with `padding_idx`."""

    def __init__(self, token: int) -> None:
        self._token = token

    def __call__(self, words: Any, inputs: tuple[Tensor, ...], found: Tensor) -> Tensor:
        fixed = inputs[0] == self._token
        if words.reduce_scatter_embeddings:  # this tensor parallel rank's part of (tokens, batch, width)
            parts = package("parallel_state")
            ranks, own = parts.get_tensor_model_parallel_world_size(), parts.get_tensor_model_parallel_rank()
            fixed = fixed.t().chunk(ranks)[own]
        return torch.where(fixed[..., None], found.detach(), found)


def _chunk(made: EngineArguments, facts: ModelFacts, config: Any, encoder: Any) -> nn.Module:
    state = package("parallel_state")
    number = package("transformer.transformer_block").get_num_layers_to_build(config)
    ends = {
        "pre_process": state.is_pipeline_first_stage(),
        "post_process": state.is_pipeline_last_stage(),
        "parallel_output": True,
        **made.model,
    }
    match facts.family:
        case "gpt2" | "llama" | "mixtral":
            layers = decoder_layers(config, number)
            gpt: nn.Module = package("models.gpt").GPTModel(config=config, transformer_layer_spec=layers, **ends)
            return gpt
        case "bert":
            with head_norm():
                bert = _bert()(config=config, transformer_layer_spec=bert_layers(config, number), **ends)
            return _as_bert(bert, facts, config)
        case "t5":
            t5: Any = package("models.T5.t5_model").T5Model(
                config=config,
                encoder_config=encoder,
                transformer_encoder_layer_spec=t5_layers(facts.encoder_layers, decodes=False),
                transformer_decoder_layer_spec=t5_layers(number, decodes=True),
                **ends,
            )
            t5.lm_head.output_layer.register_parameter("bias", None)  # which the Hub's model does not have
            if isinstance(config.activation_func, InnerDropout):
                t5.inner_dropout = config.activation_func  # to know whether it trains
            model: nn.Module = t5
            return model
        case other:
            assert_never(other)


def _as_bert(chunk: Any, facts: ModelFacts, config: Any) -> nn.Module:
    """BERT as the Hub has it: a norm after the embeddings, and its own activation in the head."""
    if chunk.pre_process:
        norm = Norm(config, config.hidden_size, config.layernorm_epsilon)
        dropout = chunk.embedding.embedding_dropout
        chunk.embedding.embedding_dropout = nn.Sequential(OrderedDict(norm=norm, dropout=dropout))
    if chunk.post_process:
        chunk.lm_head.gelu = ACTIVATION[facts.activation]
    made: nn.Module = chunk
    return made


@cache  # the class, not an instance: it is made from a package that is imported late
def _bert() -> Any:
    """megatron-core's BertModel, taking descriptions of a stage's layers."""
    base: Any = package("models.bert.bert_model").BertModel

    class BertModel(base):  # type: ignore[misc]  # megatron-core is untyped
        """BERT whose masks say which keys are padding."""

        def _sanity_check_attention_and_get_attn_mask_dimension(self) -> str:
            return "b11s"

    return BertModel
