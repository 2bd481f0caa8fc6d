"""Mesh axes and the arithmetic of ranks along them. Does not import torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from math import prod
from types import MappingProxyType
from typing import Final, Self

from hasten.config.root import Config
from hasten.errors import ConfigError

FILL: Final = -1
"""Axis size that takes the rest of the world."""


class Axis(StrEnum):
    """Mesh axis; the order is row-major over ranks (PP outermost, TP innermost)."""

    PP = "pp"
    DP_REPLICATE = "dp_replicate"
    DP_SHARD = "dp_shard"
    CP = "cp"
    TP = "tp"


AXES: Final = tuple(Axis)
"""All axes: the whole world."""
BATCH: Final = (Axis.DP_REPLICATE, Axis.DP_SHARD)
"""Ranks that read different samples."""
LOSS: Final = (*BATCH, Axis.CP)
"""Ranks whose gradients are averaged: they see different tokens."""
SHARD: Final = (Axis.DP_SHARD, Axis.CP)
"""Ranks that hold different shards of the same parameter under fully sharded data parallelism."""

_AXES_OF_SIZES: Final = MappingProxyType(
    {
        "pp_size": "pp",
        "dp_replicate_size": "dp_replicate",
        "dp_shard_size": "dp_shard",
        "cp_size": "cp",
        "sp_size": "cp",
        "tp_size": "tp",
        "ep_size": "ep",
    }
)

EXPERTS: Final = "ep"
"""Ranks that hold different experts: a subset of those of BATCH."""


@dataclass(frozen=True, slots=True)
class MeshSpec:
    """Sizes of all axes. The world size is their product; rank 0 has coordinate zero on each."""

    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1
    ep: int = 1
    """Number of data-parallel ranks that hold different experts: consecutive ranks, not a factor of the world size."""

    def __post_init__(self) -> None:
        for axis in AXES:
            if (size := getattr(self, axis)) < 1:
                raise ConfigError(
                    f"{axis}={size} is not a mesh size: every axis holds at least one process. "
                    f"Give a positive number, or {FILL} to MeshSpec.build to fill the world."
                )
        if self.ep != 1:
            _check_experts(self)

    @classmethod
    def flat(cls, world_size: int) -> Self:
        """Return a mesh in which every rank is a replica: plain data parallelism."""
        return cls(dp_replicate=world_size)

    @classmethod
    def build(
        cls,
        world_size: int,
        *,
        pp: int = 1,
        dp_replicate: int | None = None,
        dp_shard: int = 1,
        cp: int = 1,
        tp: int = 1,
        ep: int = 1,
    ) -> Self:
        """Return a mesh whose axes multiply to `world_size`; an axis of -1 takes the rest.

        `dp_replicate=None` means -1 if no other axis is -1, else 1. `ep=-1` means all data-parallel ranks.
        Raises: ConfigError if two axes are -1, or the sizes do not divide the world size.
        """
        if world_size == 1 and (pp, dp_replicate, dp_shard, cp, tp, ep) == (
            1,
            None,
            1,
            1,
            1,
            1,
        ):
            return cls()
        if world_size < 1:
            raise ConfigError(
                f"world_size={world_size} is not a number of processes; it must be at least 1."
            )
        sizes = {Axis.PP: pp, Axis.DP_SHARD: dp_shard, Axis.CP: cp, Axis.TP: tp}
        if dp_replicate is None:
            dp_replicate = 1 if FILL in sizes.values() else FILL
        sizes[Axis.DP_REPLICATE] = dp_replicate
        filled = _fill(world_size, sizes)
        everyone = filled[Axis.DP_REPLICATE] * filled[Axis.DP_SHARD]
        return cls(
            **{str(axis): size for axis, size in filled.items()},
            ep=everyone if ep == FILL else ep,
        )

    @property
    def world_size(self) -> int:
        """The number of ranks in the mesh."""
        return self.size(*AXES)

    def size(self, *axes: Axis) -> int:
        """Return the number of ranks that are peers along `axes` (1 for no axes)."""
        total = 1
        for axis in set(axes):
            total *= int(getattr(self, axis))
        return total

    def coordinate(self, rank: int) -> dict[Axis, int]:
        """Return the coordinate of `rank` on each axis."""
        self._check_rank(rank)
        where: dict[Axis, int] = {}
        for axis in reversed(AXES):
            rank, where[axis] = divmod(rank, getattr(self, axis))
        return dict(reversed(where.items()))

    def index(self, rank: int, *axes: Axis) -> int:
        """Return the position of `rank` among its peers along `axes`: `peers(rank, *axes)[index] == rank`."""
        if rank == 0:
            return 0
        where = self.coordinate(rank)
        position = 0
        for axis in _ordered(axes):
            position = position * int(getattr(self, axis)) + where[axis]
        return position

    def peers(self, rank: int, *axes: Axis) -> tuple[int, ...]:
        """Return the ranks that differ from `rank` only along `axes`, including `rank`, ascending."""
        base = rank - sum(
            step * self._stride(axis)
            for axis, step in self.coordinate(rank).items()
            if axis in axes
        )
        return tuple(base + offset for offset in self._offsets(_ordered(axes)))

    def groups(self, *axes: Axis) -> tuple[tuple[int, ...], ...]:
        """Return every set of peers along `axes`: a partition of the world, ordered by first rank."""
        members = self._offsets(_ordered(axes))
        rest = [axis for axis in AXES if axis not in axes]
        return tuple(
            tuple(first + offset for offset in members) for first in self._offsets(rest)
        )

    @property
    def expert_sizes(self) -> tuple[int, int, int]:
        """Number of ranks with replicas of the same experts, with shards of the same, and with different experts."""
        around = max(1, self.ep // self.dp_shard)
        return self.dp_replicate // around, self.dp_shard * around // self.ep, self.ep

    def expert_index(self, rank: int) -> int:
        """Return the index of the group of experts that `rank` holds."""
        self._check_rank(rank)
        return rank % self.ep

    def _stride(self, axis: Axis) -> int:
        return self.size(*AXES[AXES.index(axis) + 1 :])

    def _offsets(self, axes: list[Axis]) -> list[int]:
        """Return the offsets of the ranks along `axes` from the rank with coordinate zero on them, ascending."""
        offsets = [0]
        for axis in axes:
            stride = self._stride(axis)
            offsets = [
                base + step * stride
                for base in offsets
                for step in range(getattr(self, axis))
            ]
        return offsets

    def _check_rank(self, rank: int) -> None:
        assert 0 <= rank < self.world_size, (
            f"rank {rank} is outside the mesh of {self.world_size} ranks: {self}"
        )


def divisors(number: int) -> list[int]:
    """Return the divisors of `number`, ascending."""
    low = [d for d in range(1, int(number**0.5) + 1) if number % d == 0]
    return low + [number // d for d in reversed(low) if d * d != number]


def _check_experts(mesh: MeshSpec) -> None:
    """Raise unless the experts can be divided among consecutive data-parallel ranks."""
    replicas, shards, others = (
        mesh.dp_replicate,
        mesh.dp_shard,
        (Axis.PP, Axis.CP, Axis.TP),
    )
    beside = [axis for axis in others if mesh.size(axis) > 1]
    if beside:
        raise ConfigError(
            f"ep={mesh.ep} was asked for with {beside[0]}={mesh.size(beside[0])}; experts are divided among data-parallel "
            f"ranks only in this version. Set {beside[0]}_size=1, or ep_size=1."
        )
    fitting = sorted(
        {*divisors(shards), *(shards * more for more in divisors(replicas))}
    )
    if mesh.ep not in fitting:
        raise ConfigError(
            f"ep={mesh.ep} does not fit dp_replicate={replicas} and dp_shard={shards}: experts are divided among the "
            f"ranks of a shard group, or among whole shard groups, and ranks would be left over. Set ep_size to one of {fitting}."
        )


def _ordered(axes: tuple[Axis, ...]) -> list[Axis]:
    return [axis for axis in AXES if axis in axes]


def _fill(world_size: int, sizes: dict[Axis, int]) -> dict[Axis, int]:
    """Return `sizes` with the FILL axis replaced by its size, checked against the world size."""
    shown = (
        ", ".join(f"{axis}={sizes[axis]}" for axis in AXES if sizes[axis] != 1)
        or "all sizes 1"
    )
    for axis in AXES:
        if sizes[axis] != FILL and (sizes[axis] < 1 or world_size % sizes[axis]):
            raise ConfigError(
                f"{axis}={sizes[axis]} does not divide world_size={world_size} ({shown}), so ranks would be left over; "
                f"set {axis} to one of {divisors(world_size)}, or to {FILL} to fill."
            )
    filling = [axis for axis in AXES if sizes[axis] == FILL]
    if len(filling) > 1:
        raise ConfigError(
            f"{' and '.join(filling)} are both {FILL}, and only one axis can take what is left of "
            f"world_size={world_size}; give the others a number from {divisors(world_size)}."
        )
    fixed = prod(size for size in sizes.values() if size != FILL)
    if filling and world_size % fixed == 0:
        return {**sizes, filling[0]: world_size // fixed}
    if fixed != world_size:
        raise ConfigError(
            f"{shown} multiply to {fixed}{' without ' + filling[0] if filling else ''}, which "
            f"{'does not divide' if filling else 'is not'} world_size={world_size}, so ranks would be left over; choose "
            f"sizes whose product {'divides it' if filling else 'equals it'} (divisors: {divisors(world_size)}), "
            f"{'or start more processes' if filling else f'or set one axis to {FILL} to fill'}."
        )
    return sizes


_SHOWN: Final = 64
"""Number of ranks that a table lists; of a larger mesh, the first and the last ones."""


def mesh_of(config: Config, local_world_size: int, world_size: int) -> MeshSpec:
    """Return the mesh for a world size: the given axes, with the rest as replicas or, when sharding, as shards."""
    sizes = config.parallelism
    shard, replicate = sizes.dp_shard_size, sizes.dp_replicate_size
    if config.strategy == "fsdp" and shard is None:
        if config.fsdp.hybrid_shard and replicate is None:
            shard, replicate = local_world_size, -1
        else:
            shard = -1 if replicate != -1 else 1
    degrees: Mapping[str, int] = {}
    for section in config.sections():
        if section.section_names.strategy == config.strategy:
            degrees = section.mesh_degrees()
    return MeshSpec.build(
        world_size,
        pp=degrees.get("pp", sizes.pp_size),
        dp_replicate=replicate,
        dp_shard=1 if shard is None else shard,
        # one of them at most
        cp=degrees.get("cp", sizes.cp_size if sizes.sp_size == 1 else sizes.sp_size),
        tp=degrees.get("tp", sizes.tp_size),
        ep=sizes.ep_size,
    )


def check_mesh(config: Config, local_world_size: int, mesh: MeshSpec) -> None:
    """Raise ConfigError if the settings contradict `mesh`, the mesh of an existing process context.

    An axis whose size is not set takes the context's size; but strategy='fsdp' needs an axis to shard over.
    """
    asked = [
        name
        for name in _AXES_OF_SIZES
        if getattr(config.parallelism, name) not in (None, 1)
    ]
    wanted = mesh_of(config, local_world_size, mesh.world_size) if asked else mesh
    for name in asked:
        axis = _AXES_OF_SIZES[name]
        if getattr(wanted, axis) != getattr(mesh, axis):
            raise ConfigError(
                f"{name}={getattr(config.parallelism, name)} was set with a context whose mesh has {axis} {getattr(mesh, axis)} "
                f"({mesh_title(mesh) or 'one process'}); the process groups of a context are fixed, so the setting would have no effect. "
                f"Create the context with {axis} {getattr(wanted, axis)}, or leave out {name} or context."
            )
    if config.strategy == "fsdp" and mesh.size(*SHARD) == 1 < mesh.size(*BATCH):
        raise ConfigError(
            f"strategy='fsdp' was set with a context whose mesh is {mesh_title(mesh)}, without shards; every rank would hold the whole "
            f"model. Create the context with dp_shard {mesh.dp_replicate}, or leave out context, or use strategy='ddp'."
        )


def mesh_title(mesh: MeshSpec) -> str:
    """Return the axes larger than one, with their sizes; empty for one process."""
    axes = " x ".join(
        f"{axis} {mesh.size(axis)}" for axis in AXES if mesh.size(axis) > 1
    )
    return axes if mesh.ep == 1 else f"{axes} (experts over ep {mesh.ep})"


def mesh_table(mesh: MeshSpec, local_world_size: int) -> list[str]:
    """Return a heading and one line per rank: its machine and its coordinate on each axis larger than one."""
    axes = [axis for axis in AXES if mesh.size(axis) > 1]
    experts = ["ep"] if mesh.ep > 1 else []
    rows = [["rank", "machine", *(str(axis) for axis in axes), *experts]]
    world = mesh.world_size
    listed = (
        range(world)
        if world <= _SHOWN
        else [*range(_SHOWN // 2), *range(world - _SHOWN // 2, world)]
    )
    for rank in listed:
        where = mesh.coordinate(rank)
        places = [
            *(str(where[axis]) for axis in axes),
            *(str(mesh.expert_index(rank)) for _ in experts),
        ]
        rows.append([str(rank), str(rank // local_world_size), *places])
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [
        "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        for row in rows
    ]
    if world > _SHOWN:
        lines.insert(1 + _SHOWN // 2, f"... {world - _SHOWN} more ranks")
    return lines
