"""Tensors of a Megatron model: their names in the Hub layout, and their sharding over tensor-parallel ranks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Literal

from hasten.extensions.megatron.families import ModelFacts

Fusion = Literal["same", "transposed", "qkv", "joint_qkv", "gated"]
Split = Literal["whole", "rows", "columns", "gated", "vocab"]

WORD_EMBEDDINGS: Final = "embedding.word_embeddings.weight"


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor of the whole model."""

    name: str
    """Name in the engine, with the layer's index in the whole model."""
    hub: tuple[str, ...]
    """Tensors of the Hub layout that it is made from."""
    fusion: Fusion = "same"
    """Conversion from these tensors: `joint_qkv` is one matrix of queries, keys and values."""
    split: Split = "whole"
    """Sharded dimension; `gated` stands for two matrices, each sharded by rows."""


@dataclass(frozen=True, slots=True)
class ShardLocation:
    """A rank's shard of a tensor, as a box in the whole tensor."""

    view: tuple[int, ...]
    """Shape in which the local tensor is a box."""
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    size: tuple[int, ...]
    """Size of the box in the whole tensor; smaller than `view` for rows that pad a vocabulary."""


def tensor_entries(facts: ModelFacts) -> tuple[TensorEntry, ...]:
    """Return each tensor of the whole model once."""
    if facts.family == "gpt2":
        return tuple(_gpt2_entries(facts))
    return tuple(_llama_entries(facts))


def _gpt2_entries(facts: ModelFacts) -> Iterator[TensorEntry]:
    yield TensorEntry(
        WORD_EMBEDDINGS,
        ("transformer.wte.weight", *(("lm_head.weight",) if facts.tied else ())),
        split="vocab",
    )
    yield TensorEntry(
        "embedding.position_embeddings.weight", ("transformer.wpe.weight",)
    )
    for layer_index in range(facts.layers):
        engine_prefix = f"decoder.layers.{layer_index}."
        hub_prefix = f"transformer.h.{layer_index}."
        for tensor_kind in ("weight", "bias"):
            is_matrix = tensor_kind == "weight"
            matrix_fusion: Fusion = "transposed" if is_matrix else "same"
            matrix_split: Split = "columns" if is_matrix else "whole"
            yield TensorEntry(
                f"{engine_prefix}input_layernorm.{tensor_kind}",
                (f"{hub_prefix}ln_1.{tensor_kind}",),
            )
            yield TensorEntry(
                f"{engine_prefix}self_attention.linear_qkv.{tensor_kind}",
                (f"{hub_prefix}attn.c_attn.{tensor_kind}",),
                "joint_qkv",
                "rows",
            )
            yield TensorEntry(
                f"{engine_prefix}self_attention.linear_proj.{tensor_kind}",
                (f"{hub_prefix}attn.c_proj.{tensor_kind}",),
                matrix_fusion,
                matrix_split,
            )
            yield TensorEntry(
                f"{engine_prefix}pre_mlp_layernorm.{tensor_kind}",
                (f"{hub_prefix}ln_2.{tensor_kind}",),
            )
            yield TensorEntry(
                f"{engine_prefix}mlp.linear_fc1.{tensor_kind}",
                (f"{hub_prefix}mlp.c_fc.{tensor_kind}",),
                matrix_fusion,
                "rows",
            )
            yield TensorEntry(
                f"{engine_prefix}mlp.linear_fc2.{tensor_kind}",
                (f"{hub_prefix}mlp.c_proj.{tensor_kind}",),
                matrix_fusion,
                matrix_split,
            )
    for tensor_kind in ("weight", "bias"):
        yield TensorEntry(
            f"decoder.final_layernorm.{tensor_kind}",
            (f"transformer.ln_f.{tensor_kind}",),
        )
    if not facts.tied:
        yield TensorEntry("output_layer.weight", ("lm_head.weight",), split="vocab")


def _llama_entries(facts: ModelFacts) -> Iterator[TensorEntry]:
    yield TensorEntry(
        WORD_EMBEDDINGS,
        ("model.embed_tokens.weight", *(("lm_head.weight",) if facts.tied else ())),
        split="vocab",
    )
    for layer_index in range(facts.layers):
        engine_prefix = f"decoder.layers.{layer_index}."
        hub_prefix = f"model.layers.{layer_index}."
        yield TensorEntry(
            f"{engine_prefix}input_layernorm.weight",
            (f"{hub_prefix}input_layernorm.weight",),
        )
        head_names = tuple(
            f"{hub_prefix}self_attn.{projection}_proj.weight" for projection in "qkv"
        )
        yield TensorEntry(
            f"{engine_prefix}self_attention.linear_qkv.weight",
            head_names,
            "qkv",
            "rows",
        )
        yield TensorEntry(
            f"{engine_prefix}self_attention.linear_proj.weight",
            (f"{hub_prefix}self_attn.o_proj.weight",),
            split="columns",
        )
        yield TensorEntry(
            f"{engine_prefix}pre_mlp_layernorm.weight",
            (f"{hub_prefix}post_attention_layernorm.weight",),
        )
        gate_names = tuple(
            f"{hub_prefix}mlp.{projection}_proj.weight" for projection in ("gate", "up")
        )
        yield TensorEntry(
            f"{engine_prefix}mlp.linear_fc1.weight", gate_names, "gated", "gated"
        )
        yield TensorEntry(
            f"{engine_prefix}mlp.linear_fc2.weight",
            (f"{hub_prefix}mlp.down_proj.weight",),
            split="columns",
        )
    yield TensorEntry("decoder.final_layernorm.weight", ("model.norm.weight",))
    if not facts.tied:
        yield TensorEntry("output_layer.weight", ("lm_head.weight",), split="vocab")


def locate_shard(
    split: Split, local_shape: tuple[int, ...], rank: int, ranks: int, vocab: int
) -> ShardLocation:
    """Return the position in the whole tensor of tensor-parallel rank `rank`'s shard, which has shape `local`."""
    zeros = (0,) * len(local_shape)
    if split == "whole":
        return ShardLocation(local_shape, local_shape, zeros, local_shape)
    if split == "gated":
        rows = local_shape[0] // 2
        view = (2, rows, *local_shape[1:])
        return ShardLocation(
            view,
            (2, rows * ranks, *local_shape[1:]),
            (0, rows * rank, *zeros[1:]),
            view,
        )
    if split == "columns":
        return ShardLocation(
            local_shape,
            (local_shape[0], local_shape[1] * ranks),
            (0, local_shape[1] * rank),
            local_shape,
        )
    if split == "vocab":
        start_row = min(local_shape[0] * rank, vocab)
    else:
        start_row = local_shape[0] * rank
    whole_rows = vocab if split == "vocab" else local_shape[0] * ranks
    size = (min(local_shape[0], whole_rows - start_row), *local_shape[1:])
    return ShardLocation(
        local_shape, (whole_rows, *local_shape[1:]), (start_row, *zeros[1:]), size
    )
