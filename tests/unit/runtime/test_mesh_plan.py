"""Meshes: their table, with one line per rank, and settings that contradict the mesh of a context."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from hasten.cli.main import main
from hasten.config.root import Config
from hasten.config.sections.parallel import (
    FullyShardedDataParallelPlugin,
    ParallelismConfig,
)
from hasten.errors import ConfigError
from hasten.runtime.mesh_plan import (
    AXES,
    Axis,
    MeshSpec,
    check_mesh,
    divisors,
    mesh_of,
    mesh_table,
    mesh_title,
)


def test_each_rank_has_a_line_with_its_coordinates() -> None:
    for spec in (
        MeshSpec(dp_shard=2, cp=2, tp=2),
        MeshSpec(pp=2, dp_replicate=3),
        MeshSpec(),
        MeshSpec(tp=64),
    ):
        head, *rows = mesh_table(spec, 2)
        names = head.split()
        assert names == [
            "rank",
            "machine",
            *(str(axis) for axis in AXES if spec.size(axis) > 1),
        ]
        assert len(rows) == spec.world_size
        for rank, row in enumerate(rows):
            cells = dict(zip(names, map(int, row.split()), strict=True))
            coordinate = {
                str(axis): axis_index
                for axis, axis_index in spec.coordinate(rank).items()
            }
            assert cells == {"rank": rank, "machine": rank // 2} | {
                name: coordinate[name] for name in names[2:]
            }


def test_a_large_mesh_shows_its_ends() -> None:
    lines = mesh_table(MeshSpec(dp_shard=128, tp=8), 8)
    assert len(lines) == 66
    assert lines[33] == "... 960 more ranks"
    assert lines[-1].split() == ["1023", "127", "127", "7"]


def test_a_dry_run_prints_the_mesh(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "train.py"
    script.write_text("")
    words = [
        "launch",
        "--dry-run",
        "--cpu",
        "--num_processes=4",
        "--cp_size=2",
        "--tp_size=2",
        str(script),
    ]
    assert main(words) == 0
    shown = capsys.readouterr().out
    assert "mesh: cp 2 x tp 2 = 4 processes" in shown
    assert [line.split() for line in shown.splitlines()[-4:]] == [
        [str(rank), "0", str(rank // 2), str(rank % 2)] for rank in range(4)
    ]
    main(["launch", "--dry-run", "--cpu", "--num_processes=4", str(script)])
    assert "mesh:" not in capsys.readouterr().out


def test_experts_are_divided_among_neighbours_in_every_world() -> None:
    """Copies, shards and parts of the experts make up the data-parallel ranks; other sizes are refused with those that fit."""
    for world in range(1, 17):
        for shard in divisors(world):
            for ep in range(1, world + 1):
                try:
                    spec = MeshSpec.build(world, dp_shard=shard, ep=ep)
                except ConfigError as error:
                    offered = [
                        int(size)
                        for size in str(error)
                        .rpartition("[")[2]
                        .rstrip("].")
                        .split(",")
                    ]
                    assert ep not in offered
                    assert all(
                        MeshSpec.build(world, dp_shard=shard, ep=size).ep == size
                        for size in offered
                    )
                    continue
                copies, shards, expert_parts = spec.expert_sizes
                assert (copies * shards * expert_parts, expert_parts) == (world, ep)
                expert_indices = [spec.expert_index(rank) for rank in range(world)]
                assert expert_indices == list(range(ep)) * (world // ep)
    assert MeshSpec.build(8, dp_shard=2, ep=-1).ep == 8


def test_the_table_shows_who_holds_which_experts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "train.py"
    script.write_text("")
    assert (
        main(
            [
                "launch",
                "--dry-run",
                "--cpu",
                "--num_processes=4",
                "--ep_size=2",
                str(script),
            ]
        )
        == 0
    )
    shown = capsys.readouterr().out
    assert "mesh: dp_replicate 4 (experts over ep 2) = 4 processes" in shown
    assert [line.split() for line in shown.splitlines()[-4:]] == [
        [str(rank), "0", str(rank), str(rank % 2)] for rank in range(4)
    ]
    assert (
        main(
            [
                "launch",
                "--dry-run",
                "--cpu",
                "--num_processes=4",
                "--ep_size=3",
                str(script),
            ]
        )
        != 0
    )
    assert "Set ep_size to one of [1, 2, 4]" in capsys.readouterr().err


def test_settings_that_contradict_the_mesh_of_a_context_are_refused() -> None:
    flat, sharded, hybrid = (
        MeshSpec.flat(4),
        MeshSpec(dp_shard=4),
        MeshSpec(dp_replicate=2, dp_shard=2),
    )
    fsdp = Config(strategy="fsdp")
    with pytest.raises(
        ConfigError,
        match=r"strategy='fsdp'.*dp_replicate 4, without shards.*whole model.*dp_shard 4",
    ):
        check_mesh(fsdp, 4, flat)
    for fitting in (sharded, hybrid, MeshSpec(), MeshSpec(cp=4), MeshSpec(tp=4)):
        check_mesh(fsdp, 4, fitting)
        check_mesh(Config(), 4, fitting)
    check_mesh(Config(strategy="ddp"), 4, flat)
    tensor = Config(parallelism=ParallelismConfig(tp_size=2))
    with pytest.raises(
        ConfigError,
        match=r"tp_size=2 .* tp 1 .*no effect.*context with tp 2, or leave out tp_size",
    ):
        check_mesh(tensor, 4, flat)
    check_mesh(tensor, 4, MeshSpec(dp_replicate=2, tp=2))
    check_mesh(tensor, 4, MeshSpec(dp_shard=2, tp=2))  # shards were not asked about
    filled = Config(strategy="fsdp", parallelism=ParallelismConfig(dp_shard_size=-1))
    check_mesh(filled, 4, sharded)
    with pytest.raises(ConfigError, match=r"dp_shard_size=-1 .* dp_shard 2 "):
        check_mesh(filled, 4, hybrid)


@pytest.mark.parametrize(
    ("setting", "axis"),
    [
        ("dp_replicate_size", Axis.DP_REPLICATE),
        ("dp_shard_size", Axis.DP_SHARD),
        ("tp_size", Axis.TP),
        ("cp_size", Axis.CP),
        ("pp_size", Axis.PP),
    ],
)
def test_one_axis_may_take_all_processes(setting: str, axis: Axis) -> None:
    sizes: dict[str, Any] = {setting: -1}
    config = Config(parallelism=ParallelismConfig(**sizes))
    for world_size in range(1, 17):
        assert mesh_of(config, world_size, world_size).size(axis) == world_size


@pytest.mark.parametrize(
    ("strategy", "hybrid", "sizes", "expected"),
    [
        ("ddp", False, {}, MeshSpec(dp_replicate=8)),
        ("ddp", False, {"dp_shard_size": 2}, MeshSpec(dp_replicate=4, dp_shard=2)),
        ("fsdp", False, {}, MeshSpec(dp_shard=8)),
        ("fsdp", False, {"tp_size": 2}, MeshSpec(dp_shard=4, tp=2)),
        ("fsdp", False, {"dp_shard_size": 4}, MeshSpec(dp_replicate=2, dp_shard=4)),
        (
            "fsdp",
            False,
            {"dp_replicate_size": 2},
            MeshSpec(dp_replicate=2, dp_shard=4),
        ),
        ("fsdp", False, {"dp_replicate_size": -1}, MeshSpec(dp_replicate=8)),
        ("fsdp", True, {}, MeshSpec(dp_replicate=2, dp_shard=4)),
        ("fsdp", True, {"dp_shard_size": 2}, MeshSpec(dp_replicate=4, dp_shard=2)),
        (
            "fsdp",
            True,
            {"dp_replicate_size": 4},
            MeshSpec(dp_replicate=4, dp_shard=2),
        ),
        # only sharding has groups of a machine
        ("ddp", True, {}, MeshSpec(dp_replicate=8)),
        ("ddp", False, {"sp_size": 4}, MeshSpec(dp_replicate=2, cp=4)),
        ("ddp", False, {"cp_size": 2}, MeshSpec(dp_replicate=4, cp=2)),
        ("ddp", False, {"pp_size": 2, "ep_size": 1}, MeshSpec(2, 4)),
        ("ddp", False, {"ep_size": 4}, MeshSpec(dp_replicate=8, ep=4)),
        ("ddp", False, {"ep_size": -1}, MeshSpec(dp_replicate=8, ep=8)),
    ],
)
def test_settings_give_a_mesh(
    strategy: str, hybrid: bool, sizes: dict[str, int], expected: MeshSpec
) -> None:
    config = Config(
        strategy=strategy,
        fsdp=FullyShardedDataParallelPlugin(hybrid_shard=hybrid),
        parallelism=ParallelismConfig(**sizes),  # type: ignore[arg-type] # one type for all fields
    )
    assert mesh_of(config, local_world_size=4, world_size=8) == expected


def test_one_process_is_a_mesh_of_ones() -> None:
    sizes = range(-1, 3)
    assert MeshSpec.build(1) == MeshSpec()
    for axis in (*AXES, "ep"):
        for size in sizes:
            if size in (-1, 1):
                assert MeshSpec.build(1, **{str(axis): size}) == MeshSpec()
            else:
                with pytest.raises(ConfigError):
                    MeshSpec.build(1, **{str(axis): size})
    for world_size in (-1, 0):
        with pytest.raises(ConfigError, match="must be at least 1"):
            MeshSpec.build(world_size)
    for axis in AXES:
        with pytest.raises(ConfigError, match="is not a mesh size"):
            MeshSpec(**{str(axis): 0})


def test_sizes_of_one_do_not_make_a_world() -> None:
    with pytest.raises(
        ConfigError, match="all sizes 1 multiply to 1, which is not world_size=8"
    ):
        MeshSpec.build(8, dp_replicate=1)
    with pytest.raises(ConfigError, match=r"^cp=2, tp=2 multiply to 4, which is not"):
        MeshSpec.build(8, dp_replicate=1, cp=2, tp=2)


@pytest.mark.parametrize("axis", [Axis.PP, Axis.CP, Axis.TP])
def test_experts_need_ranks_that_differ_in_data_alone(axis: Axis) -> None:
    with pytest.raises(ConfigError, match=f"ep=2 was asked for with {axis}=2"):
        MeshSpec(**{"dp_replicate": 2, str(axis): 2, "ep": 2})
    assert MeshSpec(**{"dp_replicate": 2, str(axis): 2}).ep == 1
    with pytest.raises(ConfigError, match=r"ep=0 .* one of \[1, 2\]"):
        MeshSpec(dp_replicate=2, ep=0)


@pytest.mark.parametrize("rank", [-1, 4])
def test_a_rank_outside_holds_no_experts(rank: int) -> None:
    with pytest.raises(AssertionError, match="outside the mesh of 4"):
        MeshSpec(dp_replicate=4, ep=2).expert_index(rank)


def test_titles_name_the_axes_that_divide() -> None:
    assert mesh_title(MeshSpec()) == ""
    assert mesh_title(MeshSpec(pp=2, tp=3)) == "pp 2 x tp 3"
    assert mesh_title(MeshSpec(dp_shard=2, ep=2)) == "dp_shard 2 (experts over ep 2)"


def test_tables_are_aligned_and_cut_above_64_ranks() -> None:
    table = mesh_table(MeshSpec(dp_shard=10, ep=2), 4)
    assert table[0] == "rank  machine  dp_shard  ep"
    assert table[-1] == "   9        2         9   1"
    for world_size in (63, 64, 65, 66, 128):
        table = mesh_table(MeshSpec.flat(world_size), 8)
        ranks = [int(line.split()[0]) for line in table[1:] if "..." not in line]
        num_hidden = world_size - 64
        if num_hidden <= 0:
            assert ranks == list(range(world_size))
        else:
            assert ranks == [*range(32), *range(world_size - 32, world_size)]
            assert table[33] == f"... {num_hidden} more ranks"


def test_sizes_of_a_context_are_compared_where_they_are_set() -> None:
    mesh = MeshSpec(dp_replicate=2, cp=2)
    # a size of one asks for nothing
    for sizes in ({}, {"tp_size": 1, "dp_replicate_size": 1}, {"cp_size": 2}):
        check_mesh(
            Config(parallelism=ParallelismConfig(**sizes)),  # type: ignore[arg-type] # one type for all fields
            4,
            mesh,
        )
    sequences = Config(parallelism=ParallelismConfig(sp_size=4))
    with pytest.raises(ConfigError, match=r"sp_size=4 .* mesh has cp 2 .*with cp 4"):
        check_mesh(sequences, 4, mesh)
    experts = Config(parallelism=ParallelismConfig(ep_size=4))
    check_mesh(experts, 4, MeshSpec(dp_replicate=4, ep=4))
    with pytest.raises(ConfigError, match=r"ep_size=4 .* mesh has ep 2 "):
        check_mesh(experts, 4, MeshSpec(dp_replicate=4, ep=2))
    one_process = Config(parallelism=ParallelismConfig(dp_shard_size=-1))
    check_mesh(one_process, 1, MeshSpec())


def test_degrees_of_the_chosen_engine_win() -> None:
    def section(strategy: str, **degrees: int) -> SimpleNamespace:
        return SimpleNamespace(
            section_names=SimpleNamespace(strategy=strategy),
            mesh_degrees=lambda: degrees,
        )

    config = SimpleNamespace(
        strategy="engine",
        parallelism=ParallelismConfig(tp_size=4),
        fsdp=FullyShardedDataParallelPlugin(),
        sections=lambda: [
            section("before", tp=8),
            section("engine", tp=2, pp=2),
            section("after", cp=8),
        ],
    )
    mesh = mesh_of(cast(Config, config), local_world_size=8, world_size=8)
    assert mesh == MeshSpec(pp=2, dp_replicate=2, tp=2)
