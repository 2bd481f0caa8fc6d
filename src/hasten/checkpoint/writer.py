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
    name: str,
    component: Component,
    rank: int,
    ranks: Sequence[int],
    layout: FileLayout | None = None,
) -> list[FilePlan]:
    """Return the files of one component, as this rank sees them; `ranks` share one disk, the first of them is its main.

    For whole components the result is the same on every rank; for per-rank and sliced ones it lists this rank's file.
    """
    kind, fmt, limits = component.kind, component.format, layout or FileLayout()
    stem = (
        limits.torch_model + name.removeprefix("model")
        if kind == "model" and fmt == "torch"
        else name
    )
    if kind in limits.hidden:
        stem = f".{stem}"
    end = (
        ".safetensors"
        if fmt == "safetensors"
        else ".pt"
        if kind == "scaler"
        else ".bin"
    )
    if component.per_rank:
        # a number after the name of an object is its index
        which = f"rank_{rank}" if kind == "object" else str(rank)
        return [
            FilePlan(
                f"{stem}_{which}{end}", name, rank, tuple(component.tensors), fmt, True
            )
        ]
    if component.sliced:
        return _plan_slices(name, component, rank, ranks)
    if component.num_bytes <= limits.single:
        return [
            FilePlan(stem + end, name, ranks[0], tuple(component.tensors), fmt, True)
        ]
    # nested state cannot be split; flat tensors can
    if component.data is not None and fmt == "torch":
        fmt, end = "safetensors", ".safetensors"
    shards = cut(component, limits.shard)
    return [
        FilePlan(
            f"{stem}-{i + 1:05d}-of-{len(shards):05d}{end}",
            name,
            ranks[0] if i == 0 else ranks[i % len(ranks)],
            keys,
            fmt,
            i == 0,
        )
        for i, keys in enumerate(shards)
    ]


def _plan_slices(
    name: str, component: Component, rank: int, ranks: Sequence[int]
) -> list[FilePlan]:
    main = rank == ranks[0]
    keys = tuple(
        k
        for k, v in component.tensors.items()
        if (v.owned if isinstance(v, Slice) else main)
    )
    if not keys and not main:
        return []
    return [
        FilePlan(
            f"{name}_shard_{rank:05d}.safetensors",
            name,
            rank,
            keys,
            "safetensors",
            main,
        )
    ]


def cut(component: Component, limit: int) -> list[tuple[str, ...]]:
    """Split the keys into files of at most `limit` bytes (a larger tensor fills one file); main-only keys come first.

    Without main-only keys, files are filled as the Hub's tools fill them: on both sides of a tensor that has a file of
    its own. Names that share memory stay together, so that the tensor is stored once.
    """
    owners = find_tied_names(component.tensors)
    names: dict[str, list[str]] = {}
    for key in component.tensors:
        names.setdefault(owners.get(key, key), []).append(key)
    shards: list[tuple[str, ...]] = []
    current: list[str] = []
    used = 0
    for own in sorted(names, key=lambda key: key not in component.main_only):
        size = num_bytes(component.tensors[own])
        if size > limit and not component.main_only:
            shards.append(tuple(names[own]))
            continue
        held_by_main = not shards and own in component.main_only
        if current and used + size > limit and not held_by_main:
            shards.append(tuple(current))
            current, used = [], 0
        current += names[own]
        used += size
    return [*shards, tuple(current)] if current or not shards else shards


def hub_index(plans: Sequence[FilePlan], component: Component) -> Blob:
    """Return the index that Hub tools read next to sharded weight files."""
    weight_map = {key: plan.name for plan in plans for key in plan.keys}
    index = {"metadata": {"total_size": component.num_bytes}, "weight_map": weight_map}
    raw = json.dumps(index, indent=2, sort_keys=True).encode() + b"\n"
    return Blob([raw], len(raw))


def encode(component: Component, plan: FilePlan) -> Blob:
    """Return the bytes of one planned file."""
    tensors = dict(
        zip(plan.keys, map(component.tensors.__getitem__, plan.keys), strict=True)
    )
    data = component.data if plan.with_data else None
    if plan.format == "torch":
        return encode_torch(tensors, data)
    return encode_safetensors(tensors, data)
