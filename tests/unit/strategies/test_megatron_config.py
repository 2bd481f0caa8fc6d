"""Settings of Megatron-LM: each acts on what the engine is built with, or is refused; the layout of weights is lossless."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, Final

import pytest
import torch

from hasten.config import absent
from hasten.config.engines import MegatronLMPlugin
from hasten.config.root import Config
from hasten.config.schema import FIELDS
from hasten.config.source import Entry, Source
from hasten.errors import ConfigError, PrepareError
from hasten.runtime.axes import Axis
from hasten.runtime.mesh_plan import mesh_of
from hasten.strategies.megatron_config import translate
from hasten.strategies.megatron_families import ModelFacts, model_facts
from hasten.strategies.megatron_layout import entries, place
from hasten.strategies.megatron_weights import box_of, fuse, part_of, unfuse

GPT2: Final = SimpleNamespace(
    model_type="gpt2",
    n_layer=4,
    n_embd=16,
    n_head=4,
    n_inner=None,
    vocab_size=33,
    n_positions=12,
    layer_norm_epsilon=1e-5,
    activation_function="gelu_new",
    tie_word_embeddings=True,
    embd_pdrop=0.1,
    resid_pdrop=0.1,
    attn_pdrop=0.1,
    initializer_range=0.02,
)
LLAMA: Final = SimpleNamespace(
    model_type="llama",
    num_hidden_layers=4,
    hidden_size=16,
    num_attention_heads=4,
    num_key_value_heads=2,
    intermediate_size=24,
    vocab_size=33,
    max_position_embeddings=12,
    rms_norm_eps=1e-6,
    hidden_act="silu",
    tie_word_embeddings=False,
    initializer_range=0.02,
    rope_parameters={"rope_type": "default", "rope_theta": 500.0},
)
# What a setting needs beside it, and the keyword of the engine that it changes. Three act elsewhere: micro-batches and clipping in
# a step, the length where a batch comes in.
ACTS: Final[dict[str, tuple[dict[str, Any], str | None]]] = {
    "tp_degree": ({"tp_degree": 2}, "tensor_model_parallel_size"),
    "pp_degree": ({"pp_degree": 2}, "pipeline_model_parallel_size"),
    "sequence_parallelism": ({"tp_degree": 2, "sequence_parallelism": True}, "sequence_parallel"),
    "recompute_activations": ({"recompute_activations": True}, "recompute_granularity"),
    "recompute_granularity": ({"recompute_granularity": "full"}, "recompute_granularity"),
    "recompute_method": ({"recompute_granularity": "full", "recompute_method": "block"}, "recompute_method"),
    "recompute_num_layers": ({"recompute_granularity": "full", "recompute_num_layers": 2}, "recompute_num_layers"),
    "decoder_last_pipeline_num_layers": (
        {"pp_degree": 2, "decoder_last_pipeline_num_layers": 1},
        "num_layers_in_last_pipeline_stage",
    ),
    "attention_backend": ({"attention_backend": "local"}, "attention_backend"),
    "attention_dropout": ({"attention_dropout": 0.5}, "attention_dropout"),
    "hidden_dropout": ({"hidden_dropout": 0.5}, "hidden_dropout"),
    "attention_softmax_in_fp32": ({"attention_softmax_in_fp32": True}, "attention_softmax_in_fp32"),
    "use_distributed_optimizer": ({}, None),  # of the optimizer, not of the layers
    "num_micro_batches": ({}, None),
    "gradient_clipping": ({}, None),
    "seq_length": ({}, None),
}


def plugin(**given: Any) -> MegatronLMPlugin:
    return replace(MegatronLMPlugin(), **given)


def made(**given: Any) -> dict[str, Any]:
    return dict(translate(plugin(**given), model_facts(GPT2), "no").transformer)


@pytest.mark.parametrize("info", [info for info in FIELDS if info.path[0] == "megatron"], ids=lambda info: info.name)
def test_every_option_acts_or_is_refused_with_a_reason(info: Any) -> None:
    name = info.path[-1]
    if name in ACTS:
        given, keyword = ACTS[name]
        if keyword is not None:
            without = {key: value for key, value in given.items() if key != name}
            assert made(**given)[keyword] != made(**without)[keyword]
        return
    other: Any = {bool: not info.default}.get(type(info.default), 7)
    (complaint,) = absent.refused({info.path: Entry(info.path, other, Source("code", name))})
    assert str(complaint).startswith(f"megatron.{name}=")
    assert "is not in this version; " in str(complaint)


def test_degrees_are_axes_of_the_mesh() -> None:
    config = replace(Config(), strategy="megatron", megatron=plugin(tp_degree=2, pp_degree=3))
    mesh = mesh_of(config, 12, 12)
    assert [mesh.size(axis) for axis in (Axis.PP, Axis.DP_REPLICATE, Axis.TP)] == [3, 2, 2]
    assert mesh_of(replace(config, strategy="ddp"), 12, 12).size(Axis.DP_REPLICATE) == 12


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"tp_degree": 3}, "does not divide the model's 4 heads"),
        ({"pp_degree": 3}, "divides the model's 4 layers into stages of different size"),
        ({"decoder_last_pipeline_num_layers": 1}, "has no effect with pp_degree=1"),
        ({"sequence_parallelism": True}, "tp_degree=1; raise"),
        ({"recompute_method": "block"}, "recompute_granularity='full', or leave it out"),
        ({"recompute_activations": True, "recompute_granularity": "full"}, "keep one"),
    ],
)
def test_options_that_cannot_hold_are_refused(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        made(**given)


def test_precisions() -> None:
    facts = model_facts(LLAMA)
    assert translate(plugin(), facts, "bf16").transformer["params_dtype"] == "bfloat16"
    for other in ("fp16", "fp8"):
        with pytest.raises(ConfigError, match="use 'bf16' or 'no'"):
            translate(plugin(), facts, other)


@pytest.mark.parametrize(
    ("base", "change", "words"),
    [
        (GPT2, {"model_type": "bert"}, "type 'bert'.*only known architectures"),
        (GPT2, {"model_type": "t5"}, "type 't5'"),
        (GPT2, {"embd_pdrop": 0.3}, "embd_pdrop=0.3"),
        (GPT2, {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx=True"),
        (GPT2, {"activation_function": "swish5"}, "activation='swish5'"),
        (LLAMA, {"rope_parameters": {"rope_type": "llama3"}}, "rope_type='llama3'"),
        (LLAMA, {"attention_bias": True}, "attention_bias=True"),
    ],
)
def test_a_variant_that_would_be_computed_differently_is_refused(base: Any, change: dict[str, Any], words: str) -> None:
    with pytest.raises(PrepareError, match=words):
        model_facts(SimpleNamespace(**{**vars(base), **change}))


def hub_weights(facts: ModelFacts) -> dict[str, torch.Tensor]:
    """Tensors of the Hub layout, each number once."""
    wide = facts.heads * facts.head_dim
    narrow = facts.groups * facts.head_dim
    shapes: dict[str, tuple[int, ...]] = {}
    for entry in entries(facts):
        for name in entry.hub:
            leaf = name.rsplit(".", 2)[-2]
            shapes[name] = {
                "c_attn": (facts.hidden, 3 * wide),
                "c_proj": (facts.ffn if ".mlp." in name else wide, facts.hidden),
                "c_fc": (facts.hidden, facts.ffn),
                "q_proj": (wide, facts.hidden),
                "k_proj": (narrow, facts.hidden),
                "v_proj": (narrow, facts.hidden),
                "o_proj": (facts.hidden, wide),
                "gate_proj": (facts.ffn, facts.hidden),
                "up_proj": (facts.ffn, facts.hidden),
                "down_proj": (facts.hidden, facts.ffn),
                "wpe": (facts.positions, facts.hidden),
            }.get(leaf, (facts.vocab, facts.hidden) if "norm" not in name and ".ln_" not in name else (facts.hidden,))
            if name.endswith(".bias"):
                shapes[name] = (shapes[name][-1],)
    found, start = {}, 0
    for name, shape in shapes.items():
        size = int(torch.Size(shape).numel())
        found[name] = torch.arange(start, start + size).reshape(shape)
        start += size
    if facts.tied:
        first = entries(facts)[0].hub
        found[first[1]] = found[first[0]]
    return found


@pytest.mark.parametrize("config", [GPT2, LLAMA], ids=["gpt2", "llama"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_weights_come_back_as_they_went_in(config: Any, ranks: int) -> None:
    """Each number of the Hub's tensors lies on exactly one tensor parallel rank, or whole on all, and finds its way back."""
    facts = model_facts(config)
    hub = hub_weights(facts)
    back: dict[str, torch.Tensor] = {}
    for entry in entries(facts):
        whole = fuse(entry, hub, facts)
        again = torch.full_like(whole, -1)
        for rank in range(ranks):
            local = list(whole.shape)
            if entry.split == "gated":
                local = [2 * (local[1] // ranks), *local[2:]]
            elif entry.split != "whole":
                dim = 1 if entry.split == "columns" else 0
                local[dim] = -(-local[dim] // ranks)
            at = place(entry.split, tuple(local), rank, ranks, facts.vocab)
            held = torch.zeros(local, dtype=whole.dtype)
            part_of(held, at).copy_(box_of(whole, at))
            if entry.split != "whole":
                assert (box_of(again, at) == -1).all(), "two ranks hold the same part"
            box_of(again, at).copy_(part_of(held, at))
        assert torch.equal(again, whole), entry.name
        back |= unfuse(entry, again, facts)
    assert back.keys() == hub.keys()
    for name, value in hub.items():
        assert torch.equal(back[name], value), name
