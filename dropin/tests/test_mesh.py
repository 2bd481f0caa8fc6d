"""Meshes through the drop-in: its ParallelismConfig, torch's mesh from it, and the plan a transformers model carries."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hasten.cli.launch_cmd import make_parser
from hasten.launch.job import prepare

SCRIPT = str(Path(__file__).parent / "scripts" / "mesh_loop.py")


@pytest.mark.timeout(240)
def test_a_llama_with_its_own_plan_trains_like_plain_torch(tmp_path: Path, warm: Any) -> None:
    """The script checks the mesh, the split layers and the losses itself."""
    parsed = make_parser().parse_args(["--cpu", "--num_processes", "2", SCRIPT])
    plan = prepare([SCRIPT], settings=parsed.settings).plan
    done = warm.run(tmp_path, [SCRIPT], 2, dict(plan.procs[0].env))
    assert not done.failed, done.err[0][-3000:]
