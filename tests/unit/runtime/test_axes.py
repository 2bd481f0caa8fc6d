"""The laws of the mesh, for every factorization of every world size up to 16, and at 4096 ranks."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations
from math import prod

import pytest

from hasten.errors import ConfigError
from hasten.runtime.mesh_plan import AXES, BATCH, LOSS, SHARD, Axis, MeshSpec, divisors

SUBSETS = [axes for count in range(len(AXES) + 1) for axes in combinations(AXES, count)]


def factorizations(number: int, count: int) -> Iterator[tuple[int, ...]]:
    """Every way to write `number` as an ordered product of `count` factors."""
    if count == 1:
        yield (number,)
        return
    for first in divisors(number):
        for later_factors in factorizations(number // first, count - 1):
            yield (first, *later_factors)


def check_laws(mesh: MeshSpec, axes: tuple[Axis, ...], ranks: range) -> None:
    assert mesh.size(*axes) == prod(mesh.size(axis) for axis in axes)
    groups = mesh.groups(*axes)
    assert sorted(rank for group in groups for rank in group) == list(
        range(mesh.world_size)
    ), "groups partition ranks"
    assert [group[0] for group in groups] == sorted(group[0] for group in groups)
    coordinates = {rank: mesh.coordinate(rank) for rank in ranks}
    member_of = {rank: group for group in groups for rank in group}
    other_axes = tuple(axis for axis in AXES if axis not in axes)
    for rank in ranks:
        peers = mesh.peers(rank, *axes)
        assert peers == member_of[rank]
        assert list(peers) == sorted(peers)
        assert len(peers) == mesh.size(*axes)
        assert peers[mesh.index(rank, *axes)] == rank
        first_coordinate = coordinates.get(peers[0]) or mesh.coordinate(peers[0])
        assert [first_coordinate[axis] for axis in other_axes] == [
            coordinates[rank][axis] for axis in other_axes
        ]


@pytest.mark.parametrize("world_size", range(1, 17))
def test_laws_hold_for_every_factorization(world_size: int) -> None:
    for sizes in factorizations(world_size, len(AXES)):
        mesh = MeshSpec(*sizes)
        assert mesh.world_size == world_size
        assert (
            MeshSpec.build(world_size, **dict(zip(map(str, AXES), sizes, strict=True)))
            == mesh
        )
        for axes in SUBSETS:
            check_laws(mesh, axes, range(world_size))


@pytest.mark.parametrize(
    "sizes",
    [(4, 8, 16, 2, 4), (1, 4096, 1, 1, 1), (1, 1, 512, 1, 8), (16, 1, 32, 8, 1)],
)
def test_laws_hold_at_4096(sizes: tuple[int, ...]) -> None:
    mesh = MeshSpec(*sizes)
    assert mesh.world_size == 4096
    for axes in (BATCH, LOSS, SHARD, (Axis.PP,), (Axis.TP,), (Axis.PP, Axis.TP)):
        check_laws(mesh, axes, range(0, 4096, 61))


def test_coordinates_are_row_major_with_pp_outermost_and_tp_innermost() -> None:
    mesh = MeshSpec(pp=2, dp_replicate=3, dp_shard=5, cp=7, tp=11)
    for rank in range(0, mesh.world_size, 13):
        coordinate = mesh.coordinate(rank)
        assert (
            rank
            == (
                (
                    (coordinate[Axis.PP] * 3 + coordinate[Axis.DP_REPLICATE]) * 5
                    + coordinate[Axis.DP_SHARD]
                )
                * 7
                + coordinate[Axis.CP]
            )
            * 11
            + (coordinate[Axis.TP])
        )


def test_roles() -> None:
    assert BATCH == (Axis.DP_REPLICATE, Axis.DP_SHARD)
    assert LOSS == (Axis.DP_REPLICATE, Axis.DP_SHARD, Axis.CP)
    assert SHARD == (Axis.DP_SHARD, Axis.CP)


def test_order_and_repetition_of_axes_do_not_matter() -> None:
    mesh = MeshSpec(dp_shard=2, cp=3, tp=2)
    assert mesh.peers(5, Axis.TP, Axis.CP, Axis.TP) == mesh.peers(5, Axis.CP, Axis.TP)
    assert mesh.size(Axis.TP, Axis.TP) == 2


def test_flat_is_plain_data_parallelism() -> None:
    assert MeshSpec.flat(8) == MeshSpec(dp_replicate=8)


def test_fill_takes_what_is_left() -> None:
    for world_size in range(1, 17):
        for sizes in factorizations(world_size, len(AXES)):
            for position in range(len(AXES)):
                axis_sizes = dict(zip(map(str, AXES), sizes, strict=True))
                axis_sizes[str(AXES[position])] = -1
                assert MeshSpec.build(world_size, **axis_sizes) == MeshSpec(*sizes)


def test_replicas_fill_by_default_unless_another_axis_does() -> None:
    assert MeshSpec.build(8) == MeshSpec(dp_replicate=8)
    assert MeshSpec.build(8, tp=2) == MeshSpec(dp_replicate=4, tp=2)
    assert MeshSpec.build(8, tp=2, dp_shard=-1) == MeshSpec(dp_shard=4, tp=2)


def test_sizes_that_do_not_fit_say_which_do() -> None:
    with pytest.raises(
        ConfigError,
        match=r"tp=3 does not divide world_size=8.*set tp to one of \[1, 2, 4, 8\]",
    ):
        MeshSpec.build(8, tp=3)
    with pytest.raises(ConfigError, match=r"tp=0 does not divide"):
        MeshSpec.build(8, tp=0)
    with pytest.raises(
        ConfigError,
        match=r"multiply to 16.*is not world_size=8.*\[1, 2, 4, 8\].*-1 to fill",
    ):
        MeshSpec.build(8, dp_replicate=2, dp_shard=2, tp=4)
    with pytest.raises(
        ConfigError,
        match=r"multiply to 24 without dp_shard.*does not divide world_size=12",
    ):
        MeshSpec.build(12, dp_shard=-1, tp=4, cp=6)
    with pytest.raises(ConfigError, match=r"dp_replicate and dp_shard are both -1"):
        MeshSpec.build(8, dp_replicate=-1, dp_shard=-1)
    with pytest.raises(ConfigError, match="world_size=0"):
        MeshSpec.build(0)
    with pytest.raises(ConfigError, match="cp=-1 is not a mesh size"):
        MeshSpec(cp=-1)


def test_rank_outside_the_mesh_is_a_broken_invariant() -> None:
    with pytest.raises(AssertionError, match="rank 4 is outside the mesh of 4"):
        MeshSpec.flat(4).peers(4, Axis.TP)


def test_divisors() -> None:
    for number in range(1, 200):
        assert divisors(number) == [d for d in range(1, number + 1) if number % d == 0]
