"""Tensors of a Megatron model: their names in the Hub layout, and their sharding over tensor-parallel ranks."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Literal

from hasten.extensions.megatron.families import ModelFacts

Fusion = Literal["same", "transposed", "qkv", "joint_qkv", "gated", "expert", "gated_expert"]
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
    return tuple(_gpt2(facts) if facts.family == "gpt2" else _llama(facts))


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
