"""Mesh axes and the arithmetic of ranks along them. Does not import torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from math import prod
from types import MappingProxyType
from typing import Final, Self

from hasten.config.root import TORCH_STRATEGIES, Config
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
        axis_sizes = {Axis.PP: pp, Axis.DP_SHARD: dp_shard, Axis.CP: cp, Axis.TP: tp}
        if dp_replicate is None:
            dp_replicate = 1 if FILL in axis_sizes.values() else FILL
        axis_sizes[Axis.DP_REPLICATE] = dp_replicate
        filled_sizes = _fill_world(world_size, axis_sizes)
        num_readers = filled_sizes[Axis.DP_REPLICATE] * filled_sizes[Axis.DP_SHARD]
        return cls(
            **{str(axis): size for axis, size in filled_sizes.items()},
            ep=num_readers if ep == FILL else ep,
        )

    @property
    def world_size(self) -> int:
        """The number of ranks in the mesh."""
        return self.size(*AXES)

    def size(self, *axes: Axis) -> int:
        """Return the number of ranks that are peers along `axes` (1 for no axes)."""
        num_peers = 1
        for axis in set(axes):
            num_peers *= int(getattr(self, axis))
        return num_peers

    def coordinate(self, rank: int) -> dict[Axis, int]:
        """Return the coordinate of `rank` on each axis."""
        self._check_rank(rank)
        axis_positions: dict[Axis, int] = {}
        for axis in reversed(AXES):
            rank, axis_positions[axis] = divmod(rank, getattr(self, axis))
        return dict(reversed(axis_positions.items()))

    def index(self, rank: int, *axes: Axis) -> int:
        """Return the position of `rank` among its peers along `axes`: `peers(rank, *axes)[index] == rank`."""
        if rank == 0:
            return 0
        axis_positions = self.coordinate(rank)
        peer_index = 0
        for axis in _ordered_axes(axes):
            peer_index = peer_index * int(getattr(self, axis)) + axis_positions[axis]
        return peer_index

    def peers(self, rank: int, *axes: Axis) -> tuple[int, ...]:
        """Return the ranks that differ from `rank` only along `axes`, including `rank`, ascending."""
        base_rank = rank - sum(
            axis_position * self._axis_stride(axis)
            for axis, axis_position in self.coordinate(rank).items()
            if axis in axes
        )
        return tuple(
            base_rank + offset for offset in self._rank_offsets(_ordered_axes(axes))
        )

    def groups(self, *axes: Axis) -> tuple[tuple[int, ...], ...]:
        """Return every set of peers along `axes`: a partition of the world, ordered by first rank."""
        member_offsets = self._rank_offsets(_ordered_axes(axes))
        fixed_axes = [axis for axis in AXES if axis not in axes]
        return tuple(
            tuple(first_rank + offset for offset in member_offsets)
            for first_rank in self._rank_offsets(fixed_axes)
        )

    @property
    def expert_sizes(self) -> tuple[int, int, int]:
        """Number of ranks with replicas of the same experts, with shards of the same, and with different experts."""
        shard_groups = max(1, self.ep // self.dp_shard)
        return (
            self.dp_replicate // shard_groups,
            self.dp_shard * shard_groups // self.ep,
            self.ep,
        )

    def expert_index(self, rank: int) -> int:
        """Return the index of the group of experts that `rank` holds."""
        self._check_rank(rank)
        return rank % self.ep

    def _axis_stride(self, axis: Axis) -> int:
        return self.size(*AXES[AXES.index(axis) + 1 :])

    def _rank_offsets(self, axes: list[Axis]) -> list[int]:
        """Return the offsets of the ranks along `axes` from the rank with coordinate zero on them, ascending."""
        rank_offsets = [0]
        for axis in axes:
            stride = self._axis_stride(axis)
            rank_offsets = [
                base_offset + axis_position * stride
                for base_offset in rank_offsets
                for axis_position in range(getattr(self, axis))
            ]
        return rank_offsets

    def _check_rank(self, rank: int) -> None:
        assert 0 <= rank < self.world_size, (
            f"rank {rank} is outside the mesh of {self.world_size} ranks: {self}"
        )


def divisors(number: int) -> list[int]:
    """Return the divisors of `number`, ascending."""
    small_divisors = [
        divisor for divisor in range(1, int(number**0.5) + 1) if number % divisor == 0
    ]
    return small_divisors + [
        number // divisor
        for divisor in reversed(small_divisors)
        if divisor * divisor != number
    ]


def _check_experts(mesh: MeshSpec) -> None:
    """Raise unless the experts can be divided among consecutive data-parallel ranks."""
    replicas = mesh.dp_replicate
    shards = mesh.dp_shard
    model_axes = (Axis.PP, Axis.CP, Axis.TP)
    split_axes = [axis for axis in model_axes if mesh.size(axis) > 1]
    if split_axes:
        raise ConfigError(
            f"ep={mesh.ep} was asked for with {split_axes[0]}={mesh.size(split_axes[0])}; experts are divided among data-parallel "
            f"ranks only in this version. Set {split_axes[0]}_size=1, or ep_size=1."
        )
    fitting_sizes = sorted(
        {*divisors(shards), *(shards * num_groups for num_groups in divisors(replicas))}
    )
    if mesh.ep not in fitting_sizes:
        raise ConfigError(
            f"ep={mesh.ep} does not fit dp_replicate={replicas} and dp_shard={shards}: experts are divided among the "
            f"ranks of a shard group, or among whole shard groups, and ranks would be left over. Set ep_size to one of {fitting_sizes}."
        )


def _ordered_axes(axes: tuple[Axis, ...]) -> list[Axis]:
    return [axis for axis in AXES if axis in axes]


def _fill_world(world_size: int, axis_sizes: dict[Axis, int]) -> dict[Axis, int]:
    """Return `sizes` with the FILL axis replaced by its size, checked against the world size."""
    sizes_text = (
        ", ".join(
            f"{axis}={axis_sizes[axis]}" for axis in AXES if axis_sizes[axis] != 1
        )
        or "all sizes 1"
    )
    for axis in AXES:
        if axis_sizes[axis] != FILL and (
            axis_sizes[axis] < 1 or world_size % axis_sizes[axis]
        ):
            raise ConfigError(
                f"{axis}={axis_sizes[axis]} does not divide world_size={world_size} ({sizes_text}), so ranks would be left over; "
                f"set {axis} to one of {divisors(world_size)}, or to {FILL} to fill."
            )
    filling_axes = [axis for axis in AXES if axis_sizes[axis] == FILL]
    if len(filling_axes) > 1:
        raise ConfigError(
            f"{' and '.join(filling_axes)} are both {FILL}, and only one axis can take what is left of "
            f"world_size={world_size}; give the others a number from {divisors(world_size)}."
        )
    fixed_product = prod(size for size in axis_sizes.values() if size != FILL)
    if filling_axes and world_size % fixed_product == 0:
        return {**axis_sizes, filling_axes[0]: world_size // fixed_product}
    if fixed_product != world_size:
        raise ConfigError(
            f"{sizes_text} multiply to {fixed_product}{' without ' + filling_axes[0] if filling_axes else ''}, which "
            f"{'does not divide' if filling_axes else 'is not'} world_size={world_size}, so ranks would be left over; choose "
            f"sizes whose product {'divides it' if filling_axes else 'equals it'} (divisors: {divisors(world_size)}), "
            f"{'or start more processes' if filling_axes else f'or set one axis to {FILL} to fill'}."
        )
    return axis_sizes


_MAX_TABLE_RANKS: Final = 64
"""Number of ranks that a table lists; of a larger mesh, the first and the last ones."""


def mesh_of(config: Config, local_world_size: int, world_size: int) -> MeshSpec:
    """Return the mesh for a world size: the given axes, with the rest as replicas or, when sharding, as shards."""
    sizes = config.parallelism
    shard_size = sizes.dp_shard_size
    replicate_size = sizes.dp_replicate_size
    if config.strategy == "fsdp" and shard_size is None:
        if config.fsdp.hybrid_shard and replicate_size is None:
            shard_size = local_world_size
            replicate_size = -1
        else:
            shard_size = -1 if replicate_size != -1 else 1
    engine_degrees: Mapping[str, int] = {}
    if config.strategy not in TORCH_STRATEGIES:
        for section in config.sections():
            if section.section_names.strategy == config.strategy:
                engine_degrees = section.mesh_degrees()
    return MeshSpec.build(
        world_size,
        pp=engine_degrees.get("pp", sizes.pp_size),
        dp_replicate=replicate_size,
        dp_shard=1 if shard_size is None else shard_size,
        # one of them at most
        cp=engine_degrees.get(
            "cp", sizes.cp_size if sizes.sp_size == 1 else sizes.sp_size
        ),
        tp=engine_degrees.get("tp", sizes.tp_size),
        ep=sizes.ep_size,
    )


def check_mesh(config: Config, local_world_size: int, mesh: MeshSpec) -> None:
    """Raise ConfigError if the settings contradict `mesh`, the mesh of an existing process context.

    An axis whose size is not set takes the context's size; but strategy='fsdp' needs an axis to shard over.
    """
    set_names = [
        setting_name
        for setting_name in _AXES_OF_SIZES
        if getattr(config.parallelism, setting_name) not in (None, 1)
    ]
    if set_names:
        requested_mesh = mesh_of(config, local_world_size, mesh.world_size)
    else:
        requested_mesh = mesh
    for setting_name in set_names:
        axis = _AXES_OF_SIZES[setting_name]
        if getattr(requested_mesh, axis) != getattr(mesh, axis):
            raise ConfigError(
                f"{setting_name}={getattr(config.parallelism, setting_name)} was set with a context whose mesh has {axis} {getattr(mesh, axis)} "
                f"({mesh_title(mesh) or 'one process'}); the process groups of a context are fixed, so the setting would have no effect. "
                f"Create the context with {axis} {getattr(requested_mesh, axis)}, or leave out {setting_name} or context."
            )
    if config.strategy == "fsdp" and mesh.size(*SHARD) == 1 < mesh.size(*BATCH):
        raise ConfigError(
            f"strategy='fsdp' was set with a context whose mesh is {mesh_title(mesh)}, without shards; every rank would hold the whole "
            f"model. Create the context with dp_shard {mesh.dp_replicate}, or leave out context, or use strategy='ddp'."
        )


def mesh_title(mesh: MeshSpec) -> str:
    """Return the axes larger than one, with their sizes; empty for one process."""
    axes_text = " x ".join(
        f"{axis} {mesh.size(axis)}" for axis in AXES if mesh.size(axis) > 1
    )
    return axes_text if mesh.ep == 1 else f"{axes_text} (experts over ep {mesh.ep})"


def mesh_table(mesh: MeshSpec, local_world_size: int) -> list[str]:
    """Return a heading and one line per rank: its machine and its coordinate on each axis larger than one."""
    divided_axes = [axis for axis in AXES if mesh.size(axis) > 1]
    expert_columns = ["ep"] if mesh.ep > 1 else []
    table_rows = [
        ["rank", "machine", *(str(axis) for axis in divided_axes), *expert_columns]
    ]
    world_size = mesh.world_size
    listed_ranks = list(range(world_size))
    if world_size > _MAX_TABLE_RANKS:
        num_at_each_end = _MAX_TABLE_RANKS // 2
        listed_ranks = [
            *listed_ranks[:num_at_each_end],
            *listed_ranks[-num_at_each_end:],
        ]
    for rank in listed_ranks:
        axis_positions = mesh.coordinate(rank)
        position_cells = [
            *(str(axis_positions[axis]) for axis in divided_axes),
            *(str(mesh.expert_index(rank)) for _ in expert_columns),
        ]
        table_rows.append([str(rank), str(rank // local_world_size), *position_cells])
    column_widths = [
        max(len(table_row[column]) for table_row in table_rows)
        for column in range(len(table_rows[0]))
    ]
    table_lines = [
        "  ".join(
            cell.rjust(width)
            for cell, width in zip(table_row, column_widths, strict=True)
        )
        for table_row in table_rows
    ]
    if world_size > _MAX_TABLE_RANKS:
        table_lines.insert(
            1 + _MAX_TABLE_RANKS // 2, f"... {world_size - _MAX_TABLE_RANKS} more ranks"
        )
    return table_lines
