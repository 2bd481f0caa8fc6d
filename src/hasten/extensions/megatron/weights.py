"""Conversion of weights between the Hub layout and a Megatron model: fused, sharded over ranks, and gathered again."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import assert_never

import torch
from torch import Tensor

from hasten.checkpoint.base import Slice
from hasten.extensions.megatron.families import ModelFacts
from hasten.extensions.megatron.shard_plan import ShardLocation, TensorEntry


def fuse_tensors(
    entry: TensorEntry, hub: Mapping[str, Tensor], model_facts: ModelFacts
) -> Tensor:
    """Return a whole tensor of the engine's model, made from tensors of the Hub layout."""
    hub_tensors = [hub[name] for name in entry.hub]
    match entry.fusion:
        case "same":
            return hub_tensors[0]
        case "transposed":
            return hub_tensors[0].t()
        case "gated":
            return torch.stack(hub_tensors)
        case "joint_qkv":
            joint_qkv = hub_tensors[0]
            if joint_qkv.ndim == 2:
                joint_qkv = joint_qkv.t()
            return _interleave_groups(list(joint_qkv.chunk(3)), model_facts)
        case "qkv":
            return _interleave_groups(hub_tensors, model_facts)
        case other:
            assert_never(other)


def to_hub(
    entries: Iterable[TensorEntry],
    tensors: Mapping[str, Tensor],
    model_facts: ModelFacts,
) -> dict[str, Tensor]:
    """Return all tensors of the Hub layout, made from the whole tensors of the engine's model."""
    hub: dict[str, Tensor] = {}
    for entry in entries:
        hub |= split_tensor(entry, tensors[entry.name], model_facts)
    return hub


def split_tensor(
    entry: TensorEntry, tensor: Tensor, model_facts: ModelFacts
) -> dict[str, Tensor]:
    """Return the tensors of the Hub layout that a whole tensor of the engine's model was made from."""
    match entry.fusion:
        case "same":
            hub_tensors = [tensor] * len(entry.hub)  # tied weights stay tied
        case "transposed":
            hub_tensors = [tensor.t().contiguous()]
        case "gated":
            hub_tensors = [gated_part.contiguous() for gated_part in tensor.unbind(0)]
        case "joint_qkv":
            joint_qkv = torch.cat(_separate_groups(tensor, model_facts, 3))
            hub_tensors = [
                joint_qkv.t().contiguous() if joint_qkv.ndim == 2 else joint_qkv
            ]
        case "qkv":
            hub_tensors = _separate_groups(tensor, model_facts, len(entry.hub))
        case other:
            assert_never(other)
    return dict(zip(entry.hub, hub_tensors, strict=True))


def _rows_of_group(model_facts: ModelFacts, num_kinds: int) -> tuple[int, ...]:
    """Return the rows of queries, keys and values, or of keys and values alone, in one group of heads."""
    return (
        model_facts.heads // model_facts.groups * model_facts.head_dim,
        model_facts.head_dim,
        model_facts.head_dim,
    )[3 - num_kinds :]


def _interleave_groups(projections: list[Tensor], model_facts: ModelFacts) -> Tensor:
    """Interleave queries, keys and values by group of heads."""
    inner_shape = projections[0].shape[1:]
    grouped_projections = []
    for projection, rows in zip(
        projections, _rows_of_group(model_facts, len(projections)), strict=True
    ):
        grouped_projections.append(
            projection.reshape(model_facts.groups, rows, *inner_shape)
        )
    return torch.cat(grouped_projections, 1).flatten(0, 1)


def _separate_groups(
    tensor: Tensor, model_facts: ModelFacts, num_kinds: int
) -> list[Tensor]:
    """Separate interleaved queries, keys and values."""
    grouped_rows = tensor.reshape(model_facts.groups, -1, *tensor.shape[1:])
    projections = grouped_rows.split(_rows_of_group(model_facts, num_kinds), 1)  # type: ignore[no-untyped-call]
    return [projection.flatten(0, 1).contiguous() for projection in projections]


def unpadded_shard(tensor: Tensor, location: ShardLocation) -> Tensor:
    """Return the elements of a local tensor that exist in the whole tensor."""
    existing_elements = tensor.view(location.view)
    for dim, size in enumerate(location.size):
        existing_elements = existing_elements.narrow(dim, 0, size)
    return existing_elements


def shard_of_whole(whole_tensor: Tensor, location: ShardLocation) -> Tensor:
    """Return this rank's shard of a whole tensor."""
    for dim, (start, size) in enumerate(
        zip(location.offset, location.size, strict=True)
    ):
        whole_tensor = whole_tensor.narrow(dim, start, size)
    return whole_tensor


def slice_of(tensor: Tensor, location: ShardLocation, is_owned: bool) -> Slice:
    """Return this rank's slice in the form that checkpoints store."""
    data = unpadded_shard(tensor.detach(), location)
    return Slice(
        data, location.shape, location.offset, owned=is_owned and data.numel() > 0
    )
