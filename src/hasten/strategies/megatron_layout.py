"""The tensors of a Megatron model: their names in the Hub layout, and how they are divided over tensor parallel ranks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Literal

from hasten.strategies.megatron_config import ModelFacts

Fusion = Literal["same", "transposed", "qkv", "joint_qkv", "gated"]
Split = Literal["whole", "rows", "columns", "gated", "vocab"]

WORDS: Final = "embedding.word_embeddings.weight"


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor of the whole model."""

    name: str
    """As the engine names it, with the number the layer has in the whole model."""
    hub: tuple[str, ...]
    """The tensors of the Hub layout it is made from."""
    fusion: Fusion = "same"
    """How it is made from them: `joint_qkv` is GPT-2's one matrix of queries, keys and values."""
    split: Split = "whole"
    """Which dimension each rank holds a part of; `gated` is two matrices, each divided by rows."""


@dataclass(frozen=True, slots=True)
class Place:
    """A rank's part of a tensor, as a box in the whole one."""

    view: tuple[int, ...]
    """The shape under which the local tensor is a box."""
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    size: tuple[int, ...]
    """The part of `view` that exists in the whole tensor: rows that pad a vocabulary do not."""


def entries(facts: ModelFacts) -> tuple[Entry, ...]:
    """Every tensor of the whole model, once."""
    found = _gpt2(facts) if facts.family == "gpt2" else _llama(facts)
    return tuple(found)


def _gpt2(facts: ModelFacts) -> Iterator[Entry]:
    yield Entry(WORDS, ("transformer.wte.weight", *(("lm_head.weight",) if facts.tied else ())), split="vocab")
    yield Entry("embedding.position_embeddings.weight", ("transformer.wpe.weight",))
    for number in range(facts.layers):
        ours, hub = f"decoder.layers.{number}.", f"transformer.h.{number}."
        for kind in ("weight", "bias"):
            matrix = kind == "weight"
            turned: Fusion = "transposed" if matrix else "same"
            across: Split = "columns" if matrix else "whole"
            yield Entry(f"{ours}input_layernorm.{kind}", (f"{hub}ln_1.{kind}",))
            yield Entry(f"{ours}self_attention.linear_qkv.{kind}", (f"{hub}attn.c_attn.{kind}",), "joint_qkv", "rows")
            yield Entry(f"{ours}self_attention.linear_proj.{kind}", (f"{hub}attn.c_proj.{kind}",), turned, across)
            yield Entry(f"{ours}pre_mlp_layernorm.{kind}", (f"{hub}ln_2.{kind}",))
            yield Entry(f"{ours}mlp.linear_fc1.{kind}", (f"{hub}mlp.c_fc.{kind}",), turned, "rows")
            yield Entry(f"{ours}mlp.linear_fc2.{kind}", (f"{hub}mlp.c_proj.{kind}",), turned, across)
    for kind in ("weight", "bias"):
        yield Entry(f"decoder.final_layernorm.{kind}", (f"transformer.ln_f.{kind}",))
    if not facts.tied:
        yield Entry("output_layer.weight", ("lm_head.weight",), split="vocab")


def _llama(facts: ModelFacts) -> Iterator[Entry]:
    yield Entry(WORDS, ("model.embed_tokens.weight", *(("lm_head.weight",) if facts.tied else ())), split="vocab")
    for number in range(facts.layers):
        ours, hub = f"decoder.layers.{number}.", f"model.layers.{number}."
        yield Entry(f"{ours}input_layernorm.weight", (f"{hub}input_layernorm.weight",))
        heads = tuple(f"{hub}self_attn.{part}_proj.weight" for part in "qkv")
        yield Entry(f"{ours}self_attention.linear_qkv.weight", heads, "qkv", "rows")
        yield Entry(f"{ours}self_attention.linear_proj.weight", (f"{hub}self_attn.o_proj.weight",), split="columns")
        yield Entry(f"{ours}pre_mlp_layernorm.weight", (f"{hub}post_attention_layernorm.weight",))
        gates = tuple(f"{hub}mlp.{part}_proj.weight" for part in ("gate", "up"))
        yield Entry(f"{ours}mlp.linear_fc1.weight", gates, "gated", "gated")
        yield Entry(f"{ours}mlp.linear_fc2.weight", (f"{hub}mlp.down_proj.weight",), split="columns")
    yield Entry("decoder.final_layernorm.weight", ("model.norm.weight",))
    if not facts.tied:
        yield Entry("output_layer.weight", ("lm_head.weight",), split="vocab")


def place(split: Split, local: tuple[int, ...], rank: int, ranks: int, vocab: int) -> Place:
    """Where the part of shape `local` that tensor parallel rank `rank` holds lies in the whole tensor."""
    zeros = (0,) * len(local)
    if split == "whole":
        return Place(local, local, zeros, local)
    if split == "gated":
        rows = local[0] // 2
        view = (2, rows, *local[1:])
        return Place(view, (2, rows * ranks, *local[1:]), (0, rows * rank, *zeros[1:]), view)
    if split == "columns":
        return Place(local, (local[0], local[1] * ranks), (0, local[1] * rank), local)
    start = min(local[0] * rank, vocab) if split == "vocab" else local[0] * rank
    total = vocab if split == "vocab" else local[0] * ranks
    size = (min(local[0], total - start), *local[1:])
    return Place(local, (total, *local[1:]), (start, *zeros[1:]), size)
