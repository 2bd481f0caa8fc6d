"""Tensors of a Megatron model: their names in the Hub layout, and their sharding over tensor-parallel ranks."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Literal, assert_never

from hasten.strategies.engines.megatron.families import ModelFacts

Fusion = Literal["same", "transposed", "qkv", "joint_qkv", "kv", "gated", "expert", "gated_expert"]
Split = Literal["whole", "rows", "columns", "gated", "vocab"]

WORDS: Final = "embedding.word_embeddings.weight"
_EXPERT: Final = re.compile(r"(?<=\.local_experts\.)\d+")


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor of the whole model."""

    name: str
    """Name in the engine, with the layer's index in the whole model."""
    hub: tuple[str, ...]
    """Tensors of the Hub layout that it is made from."""
    fusion: Fusion = "same"
    """Conversion from these tensors: `joint_qkv` is one matrix of queries, keys and values, `expert` one entry of a stack."""
    split: Split = "whole"
    """Sharded dimension; `gated` stands for two matrices, each sharded by rows."""
    expert: int | None = None
    """Index of the expert in the tensor of the Hub layout."""


@dataclass(frozen=True, slots=True)
class ShardLocation:
    """A rank's shard of a tensor, as a box in the whole tensor."""

    view: tuple[int, ...]
    """Shape in which the local tensor is a box."""
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    size: tuple[int, ...]
    """Size of the box in the whole tensor; smaller than `view` for rows that pad a vocabulary."""


def expert_of(name: str) -> int | None:
    """Return the index of the expert that an engine's tensor belongs to; None for other tensors."""
    found = _EXPERT.search(name)
    return None if found is None else int(found[0])


def renumbered(name: str, expert: int) -> str:
    """Return the name of the same tensor of another expert."""
    return _EXPERT.sub(str(expert), name)


def entries(facts: ModelFacts) -> tuple[TensorEntry, ...]:
    """Return each tensor of the whole model once."""
    match facts.family:
        case "gpt2":
            return tuple(_gpt2(facts))
        case "llama" | "mixtral":
            return tuple(_llama(facts))
        case "bert":
            return tuple(_bert(facts))
        case "t5":
            return tuple(_t5(facts))
        case other:
            assert_never(other)


def _gpt2(facts: ModelFacts) -> Iterator[TensorEntry]:
    yield TensorEntry(WORDS, ("transformer.wte.weight", *(("lm_head.weight",) if facts.tied else ())), split="vocab")
    yield TensorEntry("embedding.position_embeddings.weight", ("transformer.wpe.weight",))
    for number in range(facts.layers):
        ours, hub = f"decoder.layers.{number}.", f"transformer.h.{number}."
        for kind in ("weight", "bias"):
            matrix = kind == "weight"
            turned: Fusion = "transposed" if matrix else "same"
            across: Split = "columns" if matrix else "whole"
            yield TensorEntry(f"{ours}input_layernorm.{kind}", (f"{hub}ln_1.{kind}",))
            yield TensorEntry(
                f"{ours}self_attention.linear_qkv.{kind}", (f"{hub}attn.c_attn.{kind}",), "joint_qkv", "rows"
            )
            yield TensorEntry(f"{ours}self_attention.linear_proj.{kind}", (f"{hub}attn.c_proj.{kind}",), turned, across)
            yield TensorEntry(f"{ours}pre_mlp_layernorm.{kind}", (f"{hub}ln_2.{kind}",))
            yield TensorEntry(f"{ours}mlp.linear_fc1.{kind}", (f"{hub}mlp.c_fc.{kind}",), turned, "rows")
            yield TensorEntry(f"{ours}mlp.linear_fc2.{kind}", (f"{hub}mlp.c_proj.{kind}",), turned, across)
    for kind in ("weight", "bias"):
        yield TensorEntry(f"decoder.final_layernorm.{kind}", (f"transformer.ln_f.{kind}",))
    if not facts.tied:
        yield TensorEntry("output_layer.weight", ("lm_head.weight",), split="vocab")


def _llama(facts: ModelFacts) -> Iterator[TensorEntry]:
    yield TensorEntry(WORDS, ("model.embed_tokens.weight", *(("lm_head.weight",) if facts.tied else ())), split="vocab")
    for number in range(facts.layers):
        ours, hub = f"decoder.layers.{number}.", f"model.layers.{number}."
        yield TensorEntry(f"{ours}input_layernorm.weight", (f"{hub}input_layernorm.weight",))
        heads = tuple(f"{hub}self_attn.{part}_proj.weight" for part in "qkv")
        yield TensorEntry(f"{ours}self_attention.linear_qkv.weight", heads, "qkv", "rows")
        yield TensorEntry(
            f"{ours}self_attention.linear_proj.weight", (f"{hub}self_attn.o_proj.weight",), split="columns"
        )
        yield TensorEntry(f"{ours}pre_mlp_layernorm.weight", (f"{hub}post_attention_layernorm.weight",))
        yield from _gated(ours, hub) if facts.experts is None else _mixture(ours, hub, facts.experts.number)
    yield TensorEntry("decoder.final_layernorm.weight", ("model.norm.weight",))
    if not facts.tied:
        yield TensorEntry("output_layer.weight", ("lm_head.weight",), split="vocab")


def _gated(ours: str, hub: str) -> Iterator[TensorEntry]:
    gates = tuple(f"{hub}mlp.{part}_proj.weight" for part in ("gate", "up"))
    yield TensorEntry(f"{ours}mlp.linear_fc1.weight", gates, "gated", "gated")
    yield TensorEntry(f"{ours}mlp.linear_fc2.weight", (f"{hub}mlp.down_proj.weight",), split="columns")


def _mixture(ours: str, hub: str, number: int) -> Iterator[TensorEntry]:
    yield TensorEntry(f"{ours}mlp.router.weight", (f"{hub}mlp.gate.weight",))
    for expert in range(number):
        own = f"{ours}mlp.experts.local_experts.{expert}."
        fc1, fc2 = f"{hub}mlp.experts.gate_up_proj", f"{hub}mlp.experts.down_proj"
        yield TensorEntry(f"{own}linear_fc1.weight", (fc1,), "gated_expert", "gated", expert)
        yield TensorEntry(f"{own}linear_fc2.weight", (fc2,), "expert", "columns", expert)


def _bert(facts: ModelFacts) -> Iterator[TensorEntry]:
    lead, head = "bert.embeddings.", "cls.predictions."
    yield TensorEntry(WORDS, (f"{lead}word_embeddings.weight", f"{head}decoder.weight"), split="vocab")
    yield TensorEntry("embedding.position_embeddings.weight", (f"{lead}position_embeddings.weight",))
    yield TensorEntry("embedding.tokentype_embeddings.weight", (f"{lead}token_type_embeddings.weight",))
    for kind in ("weight", "bias"):
        yield TensorEntry(f"embedding.embedding_dropout.norm.{kind}", (f"{lead}LayerNorm.{kind}",))
        yield TensorEntry(f"lm_head.dense.{kind}", (f"{head}transform.dense.{kind}",))
        yield TensorEntry(f"lm_head.layer_norm.{kind}", (f"{head}transform.LayerNorm.{kind}",))
    for number in range(facts.layers):
        ours, hub = f"encoder.layers.{number}.", f"bert.encoder.layer.{number}."
        for kind in ("weight", "bias"):
            across: Split = "columns" if kind == "weight" else "whole"
            heads = tuple(f"{hub}attention.self.{part}.{kind}" for part in ("query", "key", "value"))
            yield TensorEntry(f"{ours}self_attention.linear_qkv.{kind}", heads, "qkv", "rows")
            output = f"{hub}attention.output."
            yield TensorEntry(f"{ours}self_attention.linear_proj.{kind}", (f"{output}dense.{kind}",), split=across)
            yield TensorEntry(f"{ours}self_attn_bda.norm.{kind}", (f"{output}LayerNorm.{kind}",))
            yield TensorEntry(f"{ours}mlp.linear_fc1.{kind}", (f"{hub}intermediate.dense.{kind}",), split="rows")
            yield TensorEntry(f"{ours}mlp.linear_fc2.{kind}", (f"{hub}output.dense.{kind}",), split=across)
            yield TensorEntry(f"{ours}mlp_bda.norm.{kind}", (f"{hub}output.LayerNorm.{kind}",))
    yield TensorEntry("output_layer.bias", (f"{head}bias", f"{head}decoder.bias"), split="vocab")


def _t5(facts: ModelFacts) -> Iterator[TensorEntry]:
    shared = ("shared.weight", "encoder.embed_tokens.weight", "decoder.embed_tokens.weight")
    yield TensorEntry(WORDS, (*shared, *(("lm_head.weight",) if facts.tied else ())), split="vocab")
    for stack, layers in (("encoder", facts.encoder_layers), ("decoder", facts.layers)):
        first = f"{stack}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
        yield TensorEntry(f"{stack}_relative_pos_emb.relative_attention_bias.weight", (first,))
        for number in range(layers):
            yield from _t5_layer(
                f"{stack}.layers.{number}.", f"{stack}.block.{number}.layer.", stack == "decoder", facts
            )
        yield TensorEntry(f"{stack}.final_layernorm.norm.weight", (f"{stack}.final_layer_norm.weight",))
    if not facts.tied:
        yield TensorEntry("lm_head.output_layer.weight", ("lm_head.weight",), split="vocab")


def _t5_layer(ours: str, hub: str, crossed: bool, facts: ModelFacts) -> Iterator[TensorEntry]:
    yield TensorEntry(f"{ours}input_layernorm.weight", (f"{hub}0.layer_norm.weight",))
    own = tuple(f"{hub}0.SelfAttention.{part}.weight" for part in "qkvo")
    yield TensorEntry(f"{ours}self_attention.linear_qkv.weight", own[:3], "qkv", "rows")
    yield TensorEntry(f"{ours}self_attention.linear_proj.weight", own[3:], split="columns")
    if crossed:
        yield TensorEntry(f"{ours}pre_cross_attn_layernorm.weight", (f"{hub}1.layer_norm.weight",))
        other = tuple(f"{hub}1.EncDecAttention.{part}.weight" for part in "qkvo")
        yield TensorEntry(f"{ours}cross_attention.linear_q.weight", other[:1], split="rows")
        yield TensorEntry(f"{ours}cross_attention.linear_kv.weight", other[1:3], "kv", "rows")
        yield TensorEntry(f"{ours}cross_attention.linear_proj.weight", other[3:], split="columns")
    last = f"{hub}{2 if crossed else 1}."
    yield TensorEntry(f"{ours}pre_mlp_layernorm.weight", (f"{last}layer_norm.weight",))
    if facts.gated:
        gates = tuple(f"{last}DenseReluDense.wi_{part}.weight" for part in (0, 1))
        yield TensorEntry(f"{ours}mlp.linear_fc1.weight", gates, "gated", "gated")
    else:
        yield TensorEntry(f"{ours}mlp.linear_fc1.weight", (f"{last}DenseReluDense.wi.weight",), split="rows")
    yield TensorEntry(f"{ours}mlp.linear_fc2.weight", (f"{last}DenseReluDense.wo.weight",), split="columns")


def place(split: Split, local: tuple[int, ...], rank: int, ranks: int, vocab: int) -> ShardLocation:
    """Return the position in the whole tensor of tensor-parallel rank `rank`'s shard, which has shape `local`."""
    zeros = (0,) * len(local)
    if split == "whole":
        return ShardLocation(local, local, zeros, local)
    if split == "gated":
        rows = local[0] // 2
        view = (2, rows, *local[1:])
        return ShardLocation(view, (2, rows * ranks, *local[1:]), (0, rows * rank, *zeros[1:]), view)
    if split == "columns":
        return ShardLocation(local, (local[0], local[1] * ranks), (0, local[1] * rank), local)
    start = min(local[0] * rank, vocab) if split == "vocab" else local[0] * rank
    total = vocab if split == "vocab" else local[0] * ranks
    size = (min(local[0], total - start), *local[1:])
    return ShardLocation(local, (total, *local[1:]), (start, *zeros[1:]), size)
