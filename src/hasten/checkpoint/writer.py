"""Layout of a checkpoint: which tensor goes to which file, and which rank writes it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from hasten.checkpoint.base import Blob, Component, Format, Slice, num_bytes
from hasten.checkpoint.format.formats import (
    encode_safetensors,
    encode_torch,
    find_tied_names,
)

SINGLE_FILE_BYTES = 2 * 1024**3
"""A component up to this size is written as one file under its usual name."""
SHARD_BYTES = 1024**3
"""A larger component is split into files of this size, which are written in parallel."""


@dataclass(frozen=True, slots=True)
class FilePlan:
    """One file of a component: its name, the rank that writes it, its tensors, and whether it holds the JSON."""

    name: str
    component: str
    writer: int
    keys: tuple[str, ...]
    format: Format
    with_data: bool


@dataclass(frozen=True, slots=True)
class FileLayout:
    """Size limits above which a component is split into several files, and the components in hidden files."""

    single: int = SINGLE_FILE_BYTES
    shard: int = SHARD_BYTES
    hidden: frozenset[str] = frozenset()
    """Kinds of components whose files have names that start with a dot."""
    torch_model: str = "pytorch_model"
    """Name of the weights in torch's format, before the model's number."""


def plan_component(
    component_name: str,
    component: Component,
    rank: int,
    ranks: Sequence[int],
    layout: FileLayout | None = None,
) -> list[FilePlan]:
    """Return the files of one component, as this rank sees them; `ranks` share one disk, the first of them is its main.

    For whole components the result is the same on every rank; for per-rank and sliced ones it lists this rank's file.
    """
    kind, file_format, limits = component.kind, component.format, layout or FileLayout()
    if kind == "model" and file_format == "torch":
        stem = limits.torch_model + component_name.removeprefix("model")
    else:
        stem = component_name
    if kind in limits.hidden:
        stem = f".{stem}"
    if file_format == "safetensors":
        suffix = ".safetensors"
    elif kind == "scaler":
        suffix = ".pt"
    else:
        suffix = ".bin"
    if component.per_rank:
        # a number after the name of an object is its index
        rank_label = f"rank_{rank}" if kind == "object" else str(rank)
        return [
            FilePlan(
                f"{stem}_{rank_label}{suffix}",
                component_name,
                rank,
                tuple(component.tensors),
                file_format,
                True,
            )
        ]
    if component.sliced:
        return _plan_slices(component_name, component, rank, ranks)
    if component.num_bytes <= limits.single:
        return [
            FilePlan(
                stem + suffix,
                component_name,
                ranks[0],
                tuple(component.tensors),
                file_format,
                True,
            )
        ]
    # nested state cannot be split; flat tensors can
    if component.data is not None and file_format == "torch":
        file_format, suffix = "safetensors", ".safetensors"
    shard_keys = split_into_shards(component, limits.shard)
    return [
        FilePlan(
            f"{stem}-{shard_index + 1:05d}-of-{len(shard_keys):05d}{suffix}",
            component_name,
            ranks[0] if shard_index == 0 else ranks[shard_index % len(ranks)],
            tensor_names,
            file_format,
            shard_index == 0,
        )
        for shard_index, tensor_names in enumerate(shard_keys)
    ]


def _plan_slices(
    component_name: str, component: Component, rank: int, ranks: Sequence[int]
) -> list[FilePlan]:
    is_main = rank == ranks[0]
    tensor_names = tuple(
        tensor_name
        for tensor_name, tensor in component.tensors.items()
        if (tensor.owned if isinstance(tensor, Slice) else is_main)
    )
    if not tensor_names and not is_main:
        return []
    return [
        FilePlan(
            f"{component_name}_shard_{rank:05d}.safetensors",
            component_name,
            rank,
            tensor_names,
            "safetensors",
            is_main,
        )
    ]


def split_into_shards(component: Component, max_bytes: int) -> list[tuple[str, ...]]:
    """Split the keys into files of at most `limit` bytes (a larger tensor fills one file); main-only keys come first.

    Without main-only keys, files are filled as the Hub's tools fill them: on both sides of a tensor that has a file of
    its own. Names that share memory stay together, so that the tensor is stored once.
    """
    first_names = find_tied_names(component.tensors)
    aliases_by_name: dict[str, list[str]] = {}
    for tensor_name in component.tensors:
        aliases_by_name.setdefault(
            first_names.get(tensor_name, tensor_name), []
        ).append(tensor_name)
    shard_keys: list[tuple[str, ...]] = []
    current_shard: list[str] = []
    used_bytes = 0
    for first_name in sorted(
        aliases_by_name, key=lambda tensor_name: tensor_name not in component.main_only
    ):
        tensor_bytes = num_bytes(component.tensors[first_name])
        if tensor_bytes > max_bytes and not component.main_only:
            shard_keys.append(tuple(aliases_by_name[first_name]))
            continue
        held_by_main = not shard_keys and first_name in component.main_only
        if current_shard and used_bytes + tensor_bytes > max_bytes and not held_by_main:
            shard_keys.append(tuple(current_shard))
            current_shard, used_bytes = [], 0
        current_shard += aliases_by_name[first_name]
        used_bytes += tensor_bytes
    if current_shard or not shard_keys:
        return [*shard_keys, tuple(current_shard)]
    return shard_keys


def hub_index(file_plans: Sequence[FilePlan], component: Component) -> Blob:
    """Return the index that Hub tools read next to sharded weight files."""
    weight_map = {
        tensor_name: file_plan.name
        for file_plan in file_plans
        for tensor_name in file_plan.keys
    }
    index_table = {
        "metadata": {"total_size": component.num_bytes},
        "weight_map": weight_map,
    }
    raw_index = json.dumps(index_table, indent=2, sort_keys=True).encode() + b"\n"
    return Blob([raw_index], len(raw_index))


def encode_file(component: Component, file_plan: FilePlan) -> Blob:
    """Return the bytes of one planned file."""
    tensors = dict(
        zip(
            file_plan.keys,
            map(component.tensors.__getitem__, file_plan.keys),
            strict=True,
        )
    )
    packed_state = component.data if file_plan.with_data else None
    if file_plan.format == "torch":
        return encode_torch(tensors, packed_state)
    return encode_safetensors(tensors, packed_state)
