"""Meshes through the drop-in: its ParallelismConfig, torch's mesh from it, and the plan a transformers model carries."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hasten.cli.launch_cmd import make_parser
from hasten.launch.job import prepare

SCRIPT = str(Path(__file__).parent / "scripts" / "mesh_loop.py")
READING = str(Path(__file__).parent / "scripts" / "mesh_reading.py")


@pytest.mark.exhaustive
@pytest.mark.timeout(240)
def test_a_llama_with_its_own_plan_trains_like_plain_torch(
    tmp_path: Path, warm: Any
) -> None:
    """The script checks the mesh, the split layers and the losses itself."""
    parsed = make_parser().parse_args(["--cpu", "--num_processes", "2", SCRIPT])
    plan = prepare([SCRIPT], settings=parsed.settings).plan
    done = warm.run(tmp_path, [SCRIPT], 2, dict(plan.procs[0].env))
    assert not done.failed, done.err[0][-3000:]


@pytest.mark.timeout(240)
@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("axis", ["tp", "cp"])
@pytest.mark.parametrize("reading", ["share", "dispatch"])
def test_processes_of_one_model_or_sequence_read_the_same(
    tmp_path: Path, warm: Any, world: int, axis: str, reading: str
) -> None:
    """The script checks that each sample is read by one group of them, and by all of its processes."""
    done = warm.run(
        tmp_path, [READING, axis, reading], world, {"ACCELERATE_USE_CPU": "1"}
    )
    assert not done.failed, done.err[0][-3000:]
