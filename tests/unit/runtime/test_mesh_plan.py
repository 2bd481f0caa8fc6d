"""The table of a mesh: one line per rank with its machine and its coordinates."""

from __future__ import annotations

from pathlib import Path

import pytest

from hasten.cli.main import main
from hasten.runtime.axes import AXES, MeshSpec
from hasten.runtime.mesh_plan import mesh_table


def test_each_rank_has_a_line_with_its_coordinates() -> None:
    for spec in (MeshSpec(dp_shard=2, cp=2, tp=2), MeshSpec(pp=2, dp_replicate=3), MeshSpec(), MeshSpec(tp=64)):
        head, *rows = mesh_table(spec, 2)
        names = head.split()
        assert names == ["rank", "machine", *(str(axis) for axis in AXES if spec.size(axis) > 1)]
        assert len(rows) == spec.world_size
        for rank, row in enumerate(rows):
            cells = dict(zip(names, map(int, row.split()), strict=True))
            where = {str(axis): place for axis, place in spec.coordinate(rank).items()}
            assert cells == {"rank": rank, "machine": rank // 2} | {name: where[name] for name in names[2:]}


def test_a_large_mesh_shows_its_ends() -> None:
    lines = mesh_table(MeshSpec(dp_shard=128, tp=8), 8)
    assert len(lines) == 66
    assert lines[33] == "... 960 more ranks"
    assert lines[-1].split() == ["1023", "127", "127", "7"]


def test_a_dry_run_prints_the_mesh(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "train.py"
    script.write_text("")
    words = ["launch", "--dry-run", "--cpu", "--num_processes=4", "--cp_size=2", "--tp_size=2", str(script)]
    assert main(words) == 0
    shown = capsys.readouterr().out
    assert "mesh: cp 2 x tp 2 = 4 processes" in shown
    assert [line.split() for line in shown.splitlines()[-4:]] == [
        [str(rank), "0", str(rank // 2), str(rank % 2)] for rank in range(4)
    ]
    main(["launch", "--dry-run", "--cpu", "--num_processes=4", str(script)])
    assert "mesh:" not in capsys.readouterr().out
