"""Conversion of weights between the Hub layout and a Megatron model: fused, sharded over ranks, and gathered again."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import assert_never

import torch
from torch import Tensor

from hasten.checkpoint.base import Slice
from hasten.extensions.megatron.families import ModelFacts
from hasten.extensions.megatron.shard_plan import ShardLocation, TensorEntry


def fuse(entry: TensorEntry, hub: Mapping[str, Tensor], facts: ModelFacts) -> Tensor:
    """Return a whole tensor of the engine's model, made from tensors of the Hub layout."""
    parts = [hub[name] for name in entry.hub]
    match entry.fusion:
        case "same":
            return parts[0]
        case "transposed":
            return parts[0].t()
        case "gated":
            return torch.stack(parts)
        case "joint_qkv":
            return _by_group(list((parts[0].t() if parts[0].ndim == 2 else parts[0]).chunk(3)), facts)
        case "qkv":
            return _by_group(parts, facts)
        case "expert":
            return parts[0][entry.expert]
        case "gated_expert":
            joint = parts[0][entry.expert]
            return joint.reshape(2, -1, *joint.shape[1:])
        case other:
            assert_never(other)


def to_hub(entries: Iterable[TensorEntry], tensors: Mapping[str, Tensor], facts: ModelFacts) -> dict[str, Tensor]:
    """Return all tensors of the Hub layout, made from the whole tensors of the engine's model."""
    hub: dict[str, Tensor] = {}
    experts: dict[str, list[Tensor]] = {}
    for entry in entries:
        found = unfuse(entry, tensors[entry.name], facts)
        if entry.expert is None:
            hub |= found
        else:  # experts are listed in order
            for name, tensor in found.items():
                experts.setdefault(name, []).append(tensor)
    return hub | {name: torch.stack(parts) for name, parts in experts.items()}


def unfuse(entry: TensorEntry, tensor: Tensor, facts: ModelFacts) -> dict[str, Tensor]:
    """Return the tensors of the Hub layout that a whole tensor of the engine's model was made from."""
    match entry.fusion:
        case "same":
            parts = [tensor] * len(entry.hub)  # tied weights stay tied
        case "transposed":
            parts = [tensor.t().contiguous()]
        case "gated":
            parts = [part.contiguous() for part in tensor.unbind(0)]
        case "joint_qkv":
            joint = torch.cat(_by_kind(tensor, facts, 3))
            parts = [joint.t().contiguous() if joint.ndim == 2 else joint]
        case "qkv":
            parts = _by_kind(tensor, facts, len(entry.hub))
        case "expert":
            parts = [tensor]
        case "gated_expert":
            parts = [tensor.flatten(0, 1)]
        case other:
            assert_never(other)
    return dict(zip(entry.hub, parts, strict=True))


def _sizes(facts: ModelFacts, kinds: int) -> tuple[int, ...]:
    """Return the rows of queries, keys and values, or of keys and values alone, in one group of heads."""
    return (facts.heads // facts.groups * facts.head_dim, facts.head_dim, facts.head_dim)[3 - kinds :]


def _by_group(parts: list[Tensor], facts: ModelFacts) -> Tensor:
    """Interleave queries, keys and values by group of heads."""
    rest = parts[0].shape[1:]
    grouped = [
        part.reshape(facts.groups, size, *rest) for part, size in zip(parts, _sizes(facts, len(parts)), strict=True)
    ]
    return torch.cat(grouped, 1).flatten(0, 1)


def _by_kind(tensor: Tensor, facts: ModelFacts, kinds: int) -> list[Tensor]:
    """Separate interleaved queries, keys and values."""
    grouped = tensor.reshape(facts.groups, -1, *tensor.shape[1:])
    return [part.flatten(0, 1).contiguous() for part in grouped.split(_sizes(facts, kinds), 1)]  # type: ignore[no-untyped-call]


def part_of(tensor: Tensor, at: ShardLocation) -> Tensor:
    """Return the elements of a local tensor that exist in the whole tensor."""
    found = tensor.view(at.view)
    for dim, size in enumerate(at.size):
        found = found.narrow(dim, 0, size)
    return found


def box_of(whole: Tensor, at: ShardLocation) -> Tensor:
    """Return this rank's shard of a whole tensor."""
    for dim, (start, size) in enumerate(zip(at.offset, at.size, strict=True)):
        whole = whole.narrow(dim, start, size)
    return whole


def slice_of(tensor: Tensor, at: ShardLocation, owned: bool) -> Slice:
    """Return this rank's slice in the form that checkpoints store."""
    data = part_of(tensor.detach(), at)
    return Slice(data, at.shape, at.offset, owned=owned and data.numel() > 0)
