"""File layout of a component: a pure function of names and sizes assigns tensors to files and files to ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hasten.checkpoint.base import Component, Format, Slice, num_bytes
from hasten.checkpoint.format.formats import tied

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
class Sizes:
    """Size limits above which a component is split into several files."""

    single: int = SINGLE_FILE_BYTES
    shard: int = SHARD_BYTES


def file_stem(component: str, kind: str, fmt: Format) -> str:
    """Return the usual beginning of a file name: torch files of models are called pytorch_model."""
    return f"pytorch_{component}" if kind == "model" and fmt == "torch" else component


def suffix(kind: str, fmt: Format) -> str:
    """Return the file suffix: `.safetensors`, `.bin`, or `.pt` for the loss scaler."""
    if fmt == "safetensors":
        return ".safetensors"
    return ".pt" if kind == "scaler" else ".bin"


def plan_component(
    name: str, component: Component, rank: int, ranks: Sequence[int], sizes: Sizes | None = None
) -> list[FilePlan]:
    """Return the files of one component, as this rank sees them; `ranks` share one disk, the first of them is its main.

    For whole components the result is the same on every rank; for per-rank and sliced ones it lists this rank's file.
    """
    kind, fmt = component.kind, component.format
    if component.per_rank:
        # a number after the name of a scheduler or object is its index: scheduler_1 is the second scheduler
        which = f"rank_{rank}" if kind in ("scheduler", "object") else str(rank)
        file = f"{file_stem(name, kind, fmt)}_{which}{suffix(kind, fmt)}"
        return [FilePlan(file, name, rank, tuple(component.tensors), fmt, True)]
    if component.sliced:
        return _sliced(name, component, rank, ranks)
    limits = sizes or Sizes()
    stem, end = file_stem(name, kind, fmt), suffix(kind, fmt)
    if component.num_bytes <= limits.single:
        return [FilePlan(stem + end, name, ranks[0], tuple(component.tensors), fmt, True)]
    if component.data is not None and fmt == "torch":  # nested state cannot be split; flat tensors can
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


def _sliced(name: str, component: Component, rank: int, ranks: Sequence[int]) -> list[FilePlan]:
    main = rank == ranks[0]
    keys = tuple(k for k, v in component.tensors.items() if (v.owned if isinstance(v, Slice) else main))
    if not keys and not main:
        return []
    return [FilePlan(f"{name}_shard_{rank:05d}.safetensors", name, rank, keys, "safetensors", main)]


def cut(component: Component, limit: int) -> list[tuple[str, ...]]:
    """Split the keys into files of at most `limit` bytes (a larger tensor fills one file); main-only keys come first.

    Names that share memory stay together, so that the tensor is stored once.
    """
    owners = tied(component.tensors)
    names: dict[str, list[str]] = {}
    for key in component.tensors:
        names.setdefault(owners.get(key, key), []).append(key)
    shards: list[tuple[str, ...]] = []
    current: list[str] = []
    used = 0
    for own in sorted(names, key=lambda key: key not in component.main_only):
        size = num_bytes(component.tensors[own])
        held_by_main = not shards and own in component.main_only
        if current and used + size > limit and not held_by_main:
            shards.append(tuple(current))
            current, used = [], 0
        current += names[own]
        used += size
    shards.append(tuple(current))
    return shards


def hub_index(plans: Sequence[FilePlan], component: Component) -> dict[str, object]:
    """Return the index that Hub tools read next to sharded weight files."""
    return {
        "metadata": {"total_size": component.num_bytes},
        "weight_map": {key: plan.name for plan in plans for key in plan.keys},
    }


def check_names(plans: Sequence[FilePlan]) -> Mapping[str, FilePlan]:
    """Return the plans by file name; assert that no two components claim the same file."""
    by_name: dict[str, FilePlan] = {}
    for plan in plans:
        assert plan.name not in by_name, (
            f"{plan.name} is claimed by {plan.component} and {by_name[plan.name].component}"
        )
        by_name[plan.name] = plan
    return by_name
