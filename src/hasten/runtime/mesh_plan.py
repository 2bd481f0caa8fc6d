"""The mesh that settings and a number of processes lead to, and the table that shows it: numbers without torch."""

from __future__ import annotations

from typing import Final

from hasten.config.parallel import ParallelismConfig
from hasten.config.root import Config
from hasten.runtime.axes import AXES, MeshSpec

_SHOWN: Final = 64
"""Ranks a table lists; of a larger mesh the first and the last ones."""


def mesh_of(config: Config, local_world_size: int, world_size: int) -> MeshSpec:
    """The mesh for a world size: the given axes, and the rest to replicas or, when sharding, to shards."""
    sizes = config.parallelism
    shard, replicate = sizes.dp_shard_size, sizes.dp_replicate_size
    if config.strategy == "fsdp" and shard is None:
        if config.fsdp.hybrid_shard and replicate is None:
            shard, replicate = local_world_size, -1
        else:
            shard = -1 if replicate != -1 else 1
    engine = config.megatron if config.strategy == "megatron" else None  # its own degrees name the same axes
    return MeshSpec.build(
        world_size,
        pp=sizes.pp_size if engine is None else engine.pp_degree,
        dp_replicate=replicate,
        dp_shard=1 if shard is None else shard,
        cp=_sequence_size(sizes) if engine is None else engine.context_parallel_size,
        tp=sizes.tp_size if engine is None else engine.tp_degree,
        ep=sizes.ep_size,
    )


def _sequence_size(sizes: ParallelismConfig) -> int:
    """Ranks that split a sequence, by DeepSpeed's name for it or ours; -1 for all that are left."""
    return sizes.sp_size if sizes.sp_size > 1 else sizes.cp_size


def shards_parameters(config: Config, mesh: MeshSpec) -> bool:
    """Whether parameters are sharded over `mesh` (FSDP2) rather than copied: asked for, or needed by another axis."""
    return config.strategy == "fsdp" or max(mesh.dp_shard, mesh.tp, mesh.ep) > 1


def mesh_title(mesh: MeshSpec) -> str:
    """The axes that several ranks share, with their sizes; empty for one process."""
    axes = " x ".join(f"{axis} {mesh.size(axis)}" for axis in AXES if mesh.size(axis) > 1)
    return axes if mesh.ep == 1 else f"{axes} (experts over ep {mesh.ep})"


def mesh_table(mesh: MeshSpec, local_world_size: int) -> list[str]:
    """One line per rank: its machine and its coordinate on each axis that several ranks share, below a heading."""
    axes = [axis for axis in AXES if mesh.size(axis) > 1]
    experts = ["ep"] if mesh.ep > 1 else []
    rows = [["rank", "machine", *(str(axis) for axis in axes), *experts]]
    world = mesh.world_size
    listed = range(world) if world <= _SHOWN else [*range(_SHOWN // 2), *range(world - _SHOWN // 2, world)]
    for rank in listed:
        where = mesh.coordinate(rank)
        places = [*(str(where[axis]) for axis in axes), *(str(mesh.expert_index(rank)) for _ in experts)]
        rows.append([str(rank), str(rank // local_world_size), *places])
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    if world > _SHOWN:
        lines.insert(1 + _SHOWN // 2, f"... {world - _SHOWN} more ranks")
    return lines
