"""Settings of Megatron-LM: each acts on what the engine is built with, or is refused; the layout of weights is lossless."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, Final

import pytest
import torch

from hasten.config.checks import refuse_absent
from hasten.config.root import Config
from hasten.config.schema import FIELDS
from hasten.config.sections.launch import LaunchConfig
from hasten.config.source import SettingEntry, SettingSource
from hasten.errors import ConfigError, PrepareError
from hasten.extensions.megatron import rules
from hasten.extensions.megatron.config import make_engine_settings
from hasten.extensions.megatron.families import ModelFacts, check_class, model_facts
from hasten.extensions.megatron.settings import MegatronLMPlugin
from hasten.extensions.megatron.shard_plan import locate_shard, tensor_entries
from hasten.extensions.megatron.weights import (
    fuse_tensors,
    shard_of_whole,
    to_hub,
    unpadded_shard,
)
from hasten.runtime.mesh_plan import Axis, mesh_of

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
MODELS: Final = {"gpt2": GPT2, "llama": LLAMA}
# What a setting needs beside it, and the keyword of the engine that it changes. Those without one act elsewhere: in a step, where
# a batch comes in or a result goes out, or as a question about the model.
ACTS: Final[dict[str, tuple[dict[str, Any], str | None]]] = {
    "tp_degree": ({"tp_degree": 2}, "tensor_model_parallel_size"),
    "pp_degree": ({"pp_degree": 2}, "pipeline_model_parallel_size"),
    "sequence_parallelism": (
        {"tp_degree": 2, "sequence_parallelism": True},
        "sequence_parallel",
    ),
    "recompute_activations": ({"recompute_activations": True}, "recompute_granularity"),
    "recompute_granularity": (
        {"recompute_granularity": "full"},
        "recompute_granularity",
    ),
    "recompute_method": (
        {"recompute_granularity": "full", "recompute_method": "block"},
        "recompute_method",
    ),
    "recompute_num_layers": (
        {"recompute_granularity": "full", "recompute_num_layers": 2},
        "recompute_num_layers",
    ),
    "decoder_last_pipeline_num_layers": (
        {"pp_degree": 2, "decoder_last_pipeline_num_layers": 1},
        "num_layers_in_last_pipeline_stage",
    ),
    "attention_backend": ({"attention_backend": "local"}, "attention_backend"),
    "attention_dropout": ({"attention_dropout": 0.5}, "attention_dropout"),
    "hidden_dropout": ({"hidden_dropout": 0.5}, "hidden_dropout"),
    "attention_softmax_in_fp32": (
        {"attention_softmax_in_fp32": True},
        "attention_softmax_in_fp32",
    ),
    "use_distributed_optimizer": ({}, None),  # of the optimizer, not of the layers
    "num_micro_batches": ({}, None),
    "gradient_clipping": ({}, None),
    "seq_length": ({}, None),
    "return_logits": ({}, None),
}


def plugin(**options: Any) -> MegatronLMPlugin:
    return replace(MegatronLMPlugin(), **options)


def made(model: str = "gpt2", **options: Any) -> dict[str, Any]:
    return dict(
        make_engine_settings(
            plugin(**options), model_facts(MODELS[model]), "no"
        ).transformer
    )


@pytest.mark.parametrize(
    "info",
    [info for info in FIELDS if info.path[0] == "megatron"],
    ids=lambda info: info.name,
)
def test_every_option_acts_or_is_refused_with_a_reason(info: Any) -> None:
    name = info.path[-1]
    if name in ACTS:
        options, keyword = ACTS[name]
        if keyword is not None:
            without = {key: value for key, value in options.items() if key != name}
            assert made(**options)[keyword] != made(**without)[keyword]
        return
    altered: Any = {bool: not info.default}.get(type(info.default), 7)
    entry = SettingEntry(info.path, altered, SettingSource("code", name))
    with pytest.raises(
        ConfigError, match=rf"^megatron\.{name}=.*is not in this version; "
    ):
        refuse_absent({info.path: entry})


def test_degrees_are_axes_of_the_mesh() -> None:
    sizes = plugin(tp_degree=2, pp_degree=3)
    config = Config(strategy="megatron", megatron=sizes)  # type: ignore[call-arg]  # its section
    mesh = mesh_of(config, 12, 12)
    assert [
        mesh.size(axis) for axis in (Axis.PP, Axis.DP_REPLICATE, Axis.CP, Axis.TP)
    ] == [3, 2, 1, 2]
    assert (
        mesh_of(replace(config, strategy="ddp"), 12, 12).size(Axis.DP_REPLICATE) == 12
    )


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"tp_degree": 3}, "does not divide the model's 4 heads"),
        (
            {"pp_degree": 3},
            "divides the model's 4 layers into stages of different size",
        ),
        ({"decoder_last_pipeline_num_layers": 1}, "has no effect with pp_degree=1"),
        ({"sequence_parallelism": True}, "tp_degree=1; increase"),
        ({"recompute_method": "block"}, "recompute_granularity='full', or remove it"),
        ({"recompute_activations": True, "recompute_granularity": "full"}, "keep one"),
    ],
)
def test_options_that_cannot_hold_are_refused(
    options: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        made(**options)


@pytest.mark.parametrize(
    ("tp", "pp", "fits"), [(2, 2, True), (4, 1, True), (8, 1, False), (2, 4, False)]
)
def test_degrees_divide_the_processes(tp: int, pp: int, fits: bool) -> None:
    megatron_plugin = plugin(tp_degree=tp, pp_degree=pp)
    config = Config(
        strategy="megatron",
        launch=LaunchConfig(num_processes=4),
        megatron=megatron_plugin,
    )  # type: ignore[call-arg]  # its section
    complaints = [str(complaint) for complaint in rules.check_sizes(config, {})]
    assert [
        complaint
        for complaint in complaints
        if "use a multiple of 8 processes" in complaint
    ] == ([] if fits else complaints)
    assert bool(complaints) is not fits


def test_precisions() -> None:
    facts = model_facts(LLAMA)
    assert (
        make_engine_settings(plugin(), facts, "bf16").transformer["params_dtype"]
        == "bfloat16"
    )
    for precision in ("fp16", "fp8"):
        with pytest.raises(ConfigError, match="use 'bf16' or 'no'"):
            make_engine_settings(plugin(), facts, precision)


@pytest.mark.parametrize(
    ("base", "change", "words"),
    [
        (GPT2, {"model_type": "opt"}, "type 'opt'.*only these architectures"),
        (GPT2, {"embd_pdrop": 0.3}, "embd_pdrop=0.3"),
        (
            GPT2,
            {"scale_attn_by_inverse_layer_idx": True},
            "scale_attn_by_inverse_layer_idx=True",
        ),
        (GPT2, {"activation_function": "swish5"}, "activation='swish5'"),
        (LLAMA, {"rope_parameters": {"rope_type": "llama3"}}, "rope_type='llama3'"),
        (LLAMA, {"attention_bias": True}, "attention_bias=True"),
    ],
)
def test_a_variant_that_would_be_computed_differently_is_refused(
    base: Any, change: dict[str, Any], words: str
) -> None:
    with pytest.raises(PrepareError, match=words):
        model_facts(SimpleNamespace(**{**vars(base), **change}))


def test_another_head_is_refused() -> None:
    with pytest.raises(
        PrepareError,
        match=r"LlamaForSequenceClassification: .* pass a LlamaForCausalLM",
    ):
        check_class(["LlamaForSequenceClassification", "Module"], model_facts(LLAMA))
    check_class(["MyLlama", "LlamaForCausalLM"], model_facts(LLAMA))


def shape_of(name: str, facts: ModelFacts) -> tuple[int, ...]:
    """The shape of a tensor of the Hub layout."""
    hidden, ffn = facts.hidden, facts.ffn
    wide, narrow = facts.heads * facts.head_dim, facts.groups * facts.head_dim
    turned = {
        "c_attn": (hidden, 3 * wide),
        "c_fc": (hidden, ffn),
        "mlp.c_proj": (ffn, hidden),
        "c_proj": (wide, hidden),
    }
    for end, shape in {
        **turned,
        "q_proj": (wide, hidden),
        **dict.fromkeys(("k_proj", "v_proj"), (narrow, hidden)),
        "o_proj": (hidden, wide),
        **dict.fromkeys(("gate_proj", "up_proj"), (ffn, hidden)),
        "down_proj": (hidden, ffn),
        "wpe": (facts.positions, hidden),
        **dict.fromkeys(("norm", "ln_1", "ln_2", "ln_f"), (hidden,)),
    }.items():
        layer, _, kind = name.rpartition(".")
        if name.endswith(end) or layer.endswith(end):
            return (
                ((shape[-1] if end in turned else shape[0]),)
                if kind == "bias"
                else shape
            )
    return (facts.vocab,) if name.endswith("bias") else (facts.vocab, hidden)


def hub_weights(facts: ModelFacts) -> dict[str, torch.Tensor]:
    """Tensors of the Hub layout, each number once."""
    shapes = {
        name: shape_of(name, facts)
        for entry in tensor_entries(facts)
        for name in entry.hub
    }
    tensors, start = {}, 0
    for name, shape in shapes.items():
        size = int(torch.Size(shape).numel())
        tensors[name] = torch.arange(start, start + size).reshape(shape)
        start += size
    for entry in tensor_entries(facts):
        if entry.fusion == "same":  # several names of one tensor
            tensors |= dict.fromkeys(entry.hub, tensors[entry.hub[0]])
    return tensors


@pytest.mark.parametrize("config", MODELS.values(), ids=MODELS)
@pytest.mark.parametrize("ranks", [1, 2])
def test_weights_come_back_as_they_went_in(config: Any, ranks: int) -> None:
    """Each number of the Hub's tensors lies on exactly one tensor parallel rank, or whole on all, and finds its way back."""
    facts = model_facts(config)
    hub = hub_weights(facts)
    rebuilt_tensors: dict[str, torch.Tensor] = {}
    for entry in tensor_entries(facts):
        fused = fuse_tensors(entry, hub, facts)
        rebuilt = torch.full_like(fused, -1)
        for rank in range(ranks):
            local = list(fused.shape)
            if entry.split == "gated":
                local = [2 * (local[1] // ranks), *local[2:]]
            elif entry.split != "whole":
                dim = 1 if entry.split == "columns" else 0
                local[dim] = -(-local[dim] // ranks)
            location = locate_shard(entry.split, tuple(local), rank, ranks, facts.vocab)
            local_shard = torch.zeros(local, dtype=fused.dtype)
            unpadded_shard(local_shard, location).copy_(shard_of_whole(fused, location))
            if entry.split != "whole":
                assert (shard_of_whole(rebuilt, location) == -1).all(), (
                    "two ranks hold the same part"
                )
            shard_of_whole(rebuilt, location).copy_(
                unpadded_shard(local_shard, location)
            )
        assert torch.equal(rebuilt, fused), entry.name
        rebuilt_tensors[entry.name] = rebuilt
    hub_tensors = to_hub(tensor_entries(facts), rebuilt_tensors, facts)
    assert hub_tensors.keys() == hub.keys()
    for name, value in hub.items():
        assert torch.equal(hub_tensors[name], value), name
