"""Who differs from whom, decided from records alone: every odd set of ranks of every small mesh is found and named."""

from __future__ import annotations

from itertools import combinations

import pytest

from hasten.extensions.divergence.divergence import Record, find_divergence
from hasten.runtime.mesh_plan import Axis, MeshSpec

MESHES = (
    MeshSpec(dp_replicate=5),
    MeshSpec(dp_replicate=2, dp_shard=3),
    MeshSpec(dp_replicate=3, tp=2),
    MeshSpec(pp=2, dp_replicate=3),
)


def records(
    mesh: MeshSpec, axes: tuple[Axis, ...], odd: tuple[int, ...]
) -> dict[int, list[Record]]:
    """Each set of peers holds a value of its own, and the odd ranks something else."""
    names = tuple(map(str, axes))
    return {
        rank: [
            Record(
                "parameter",
                "weight",
                names,
                10 * mesh.peers(rank, *axes)[0] + (rank in odd),
            )
        ]
        for rank in range(mesh.world_size)
    }


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_the_minority_of_each_group_is_named(mesh: MeshSpec) -> None:
    for axes in ((Axis.DP_REPLICATE,), (Axis.DP_REPLICATE, Axis.DP_SHARD, Axis.TP)):
        assert find_divergence(records(mesh, axes, ()), mesh, 7, 3) is None
        for size in (1, 2):
            for odd in combinations(range(mesh.world_size), size):
                divergence = find_divergence(records(mesh, axes, odd), mesh, 7, 3)
                expected = set()
                for group in mesh.groups(*axes):
                    camp = set(group) & set(odd)
                    remaining = set(group) - camp
                    if camp and remaining:
                        lead = min(group)
                        smaller = len(camp) < len(remaining) or (
                            len(camp) == len(remaining) and lead in remaining
                        )
                        expected |= camp if smaller else remaining
                assert (() if divergence is None else divergence.odd) == tuple(
                    sorted(expected)
                )


def test_a_tensor_that_some_ranks_lack_differs() -> None:
    mesh = MeshSpec(dp_replicate=3)
    axes = (str(Axis.DP_REPLICATE),)
    rank_records = {
        rank: [Record("state", "weight (exp_avg)", axes, 1)] for rank in (0, 1)
    } | {2: []}
    divergence = find_divergence(rank_records, mesh, 7, None)
    assert divergence is not None
    assert (divergence.cause, divergence.odd) == ("state", (2,))
    assert "  rank 2 differs from ranks 0-1\n" in divergence.describe_report("x")


def test_the_cause_comes_before_its_consequences() -> None:
    mesh = MeshSpec(dp_replicate=2)
    axes = (str(Axis.DP_REPLICATE),)
    order = (
        ("setting", "settings"),
        ("gradient", "gradients"),
        ("state", "state"),
        ("parameter", "outside"),
        ("buffer", "buffers"),
    )
    for first in range(len(order)):
        kinds = [kind for kind, _ in order[first:]]
        rank_records = {
            rank: [Record(kind, kind, axes, rank) for kind in kinds]
            for rank in range(2)
        }
        divergence = find_divergence(rank_records, mesh, 7, 3)
        assert divergence is not None
        assert divergence.cause == order[first][1]
        for phrase in (
            "seen at update 7 (all agreed at update 3)",
            "cause:",
            "cure:",
            "now:   x",
        ):
            assert phrase in divergence.describe_report("x")


def test_gradients_alone_are_no_alarm() -> None:
    mesh = MeshSpec(tp=2)
    axes = (str(Axis.TP),)
    rank_records = {
        rank: [Record(kind, kind, axes, rank) for kind in ("gradient", "updates")]
        for rank in range(2)
    }
    assert find_divergence(rank_records, mesh, 1, None) is None
