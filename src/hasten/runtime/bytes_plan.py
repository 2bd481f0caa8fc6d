"""Formulas for the bytes that a rank holds and sends under a mesh. Does not import torch.

Bytes sent assume a bandwidth-optimal collective over n ranks: (n-1)/n of the whole tensor for all-gather, reduce-scatter and all-to-all,
twice that for an all-reduce, the whole tensor for a message to one rank. Sizes are assumed to divide evenly.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from hasten.runtime.mesh_plan import LOSS, SHARD, Axis, MeshSpec

Traffic = dict[str, float]
"""Bytes each rank sends, by axis."""
_UNITS: Final = ("bytes", "KiB", "MiB", "GiB", "TiB")


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """Parameter counts of one model (of one stage, under a pipeline), by the way they are distributed."""

    whole: int
    """Parameters that only data parallelism distributes."""
    split: int = 0
    """Parameters of layers split over `tp`."""
    experts: int = 0
    """Parameters of experts divided over `ep`."""


@dataclass(frozen=True, slots=True)
class BytesBetweenSteps:
    """Bytes that one rank holds between two steps."""

    parameters: float
    gradients: float
    optimizer: float

    @property
    def total(self) -> float:
        """Sum of parameters, gradients and optimizer state."""
        return self.parameters + self.gradients + self.optimizer


def exchanged_bytes(num_bytes: float, ranks: int) -> float:
    """Return the bytes that each rank sends to all-gather, reduce-scatter or exchange `num_bytes` over `ranks`."""
    return num_bytes * (ranks - 1) / ranks


def all_reduced_bytes(num_bytes: float, ranks: int) -> float:
    """Return the bytes that each rank sends to all-reduce a tensor of `num_bytes` over `ranks`."""
    return 2 * exchanged_bytes(num_bytes, ranks)


def held_bytes(
    mesh: MeshSpec,
    weights: Weights,
    *,
    item_bytes: int = 4,
    moments: int = 2,
    sharded: bool = True,
) -> BytesBetweenSteps:
    """Return the bytes of parameters, gradients and optimizer state (`moments` per parameter) on each rank.

    With `sharded`, parameters are sharded where the mesh allows it; otherwise data-parallel ranks hold replicas (DDP).
    """
    _, expert_shards, expert_groups = mesh.expert_sizes
    num_shards = mesh.size(*SHARD) if sharded else 1
    num_parameters = (
        weights.whole + weights.split / mesh.tp
    ) / num_shards + weights.experts / (expert_shards * expert_groups)
    return BytesBetweenSteps(
        num_parameters * item_bytes,
        num_parameters * item_bytes,
        num_parameters * item_bytes * moments,
    )


def data_traffic(
    mesh: MeshSpec,
    weights: Weights,
    *,
    item_bytes: int = 4,
    reduce_item: int = 4,
    micro_steps: int = 1,
    gathers: int = 2,
    sharded: bool = True,
) -> Traffic:
    """Return the bytes that data parallelism sends in one step.

    Shards are gathered `gathers` times per micro-step (again for the backward, unless they stay unsharded) and reduced once;
    replicas are reduced once per step. `sharded` is that of `held_bytes`.
    """
    bytes_by_axis: Traffic = {}
    if not sharded:
        joined_axes = "+".join(
            joined_axes for joined_axes in LOSS if mesh.size(joined_axes) > 1
        )
        _add_bytes(
            bytes_by_axis,
            joined_axes,
            all_reduced_bytes(weights.whole * reduce_item, mesh.size(*LOSS)),
        )
        return _without_zeros(bytes_by_axis)
    expert_replicas, expert_shards, _ = mesh.expert_sizes
    counts_and_degrees = (
        (weights.whole + weights.split / mesh.tp, mesh.dp_replicate, mesh.size(*SHARD)),
        (weights.experts / mesh.ep, expert_replicas, expert_shards),
    )
    for num_parameters, num_replicas, num_shards in counts_and_degrees:
        micro_step_bytes = gathers * exchanged_bytes(
            num_parameters * item_bytes, num_shards
        ) + exchanged_bytes(num_parameters * reduce_item, num_shards)
        _add_bytes(bytes_by_axis, Axis.DP_SHARD, micro_steps * micro_step_bytes)
        _add_bytes(
            bytes_by_axis,
            Axis.DP_REPLICATE,
            all_reduced_bytes(num_parameters * reduce_item / num_shards, num_replicas),
        )
    return _without_zeros(bytes_by_axis)


def tensor_traffic(
    mesh: MeshSpec, *, tokens: int, summed: int, gathered: int = 0, item_bytes: int = 4
) -> Traffic:
    """Return the bytes that tensor-parallel layers send in one micro-step of `tokens`.

    `summed` is the sum of the widths that are all-reduced: outputs of row-wise layers (and of embeddings), and inputs of
    column-wise layers, for their gradients. `gathered` is the sum of the widths of outputs that are gathered (a head).
    """
    reduced_bytes = all_reduced_bytes(tokens * summed * item_bytes, mesh.tp)
    return _without_zeros(
        {
            Axis.TP: reduced_bytes
            + exchanged_bytes(tokens * gathered * item_bytes, mesh.tp)
        }
    )


def _add_bytes(bytes_by_axis: Traffic, axis: str, num_bytes: float) -> None:
    bytes_by_axis[axis] = bytes_by_axis.get(axis, 0) + num_bytes


def _without_zeros(bytes_by_axis: Traffic) -> Traffic:
    nonzero_bytes = {}
    for axis, num_bytes in bytes_by_axis.items():
        if num_bytes:
            nonzero_bytes[str(axis)] = num_bytes
    return nonzero_bytes


def format_traffic(bytes_by_axis: Traffic) -> str:
    """Return the bytes by axis as text: `dp_shard 1.5 MiB, ep 0.2 KiB`."""
    return (
        ", ".join(
            f"{axis} {format_bytes(num_bytes)}"
            for axis, num_bytes in bytes_by_axis.items()
        )
        or "nothing"
    )


def format_bytes(num_bytes: float) -> str:
    """Return a number of bytes with a suitable unit."""
    scaled = num_bytes
    exponent = 0
    while abs(scaled) >= 1024 and exponent < len(_UNITS) - 1:
        scaled /= 1024
        exponent += 1
    digits = 0 if exponent == 0 else 1
    return f"{scaled:.{digits}f} {_UNITS[exponent]}"
