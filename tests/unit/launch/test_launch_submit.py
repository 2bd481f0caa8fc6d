"""The batch scripts for SLURM, run by a real shell with stand-ins for SLURM's commands: what they do with exit codes."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Final

import pytest

from hasten.config import handoff
from hasten.config.resolve import resolve
from hasten.launch.base import Request, Target
from hasten.launch.host import Host
from hasten.launch.slurm import plan_submit

EXAMPLE: Final = Path(__file__).parents[3] / "examples" / "slurm" / "train.sbatch"


def planned(folder: Path) -> str:
    """The script that `hasten launch --submit slurm` writes."""
    resolved = resolve()
    request = Request(resolved.config, Target("train.py", ("--data", "my data")), handoff.pack(resolved))
    (script,) = plan_submit(request, Host(name="login"), (), str(folder)).files
    return script.text


@pytest.mark.parametrize("which", ["planned", "example"])
@pytest.mark.parametrize(("code", "requeued"), [(0, False), (1, False), (85, True), (137, False)])
def test_a_job_that_has_saved_goes_back_into_the_queue(tmp_path: Path, which: str, code: int, requeued: bool) -> None:
    for name, text in (("srun", f"echo srun $# >> told; exit {code}"), ("scontrol", "echo scontrol $@ >> told")):
        command = tmp_path / name
        command.write_text(f"#!/bin/sh\n{text}\n")
        command.chmod(0o755)
    script = planned(tmp_path) if which == "planned" else EXAMPLE.read_text()
    env = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "77"}
    done = subprocess.run(["bash", "-c", script], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == code, done.stderr
    told = (tmp_path / "told").read_text().splitlines()
    assert told[0].startswith("srun")
    assert told[1:] == (["scontrol requeue 77"] if requeued else [])
