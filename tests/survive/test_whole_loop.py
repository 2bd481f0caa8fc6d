"""Loops with evaluation, metrics, a tracker and checkpoints, whose replicas come and go."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.survive.driving import HERE, finish, wait_for
from tests.survive.reading import results

pytestmark = pytest.mark.timeout(3000)  # processes that load torch, some of them again
LIMIT_S = 600.0


def start(folder: Path, epochs: int) -> subprocess.Popen[str]:
    """Start two replicas of the program."""
    command = [sys.executable, "-m", "hasten", "launch", "--cpu", "--replicas", "2"]
    command += [str(HERE / "whole_program.py"), str(folder), str(epochs)]
    path = os.pathsep.join([str(HERE.parents[1]), *filter(None, sys.path)])
    with (folder / "out.txt").open("w") as out:
        return subprocess.Popen(
            command,
            stdout=out,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            env={**os.environ, "PYTHONPATH": path},
        )


def test_evaluations_trackers_and_checkpoints_continue_when_a_replica_is_lost(tmp_path: Path) -> None:
    run = start(tmp_path, 3)
    found = wait_for(run, tmp_path, 2)
    os.kill(found["1"], signal.SIGKILL)
    finish(run, tmp_path, LIMIT_S)
    first = results(tmp_path)["0"]
    assert [number for number, _ in first["evaluations"]] == [22, 22, 22]  # the whole of it, on each replica
    assert all(one["weights"] == first["weights"] for one in results(tmp_path).values())
    assert all(one["evaluations"][-1] == first["evaluations"][-1] for one in results(tmp_path).values())
    (metrics,) = tmp_path.glob("project/**/metrics.jsonl")
    logged = [json.loads(line) for line in metrics.read_text().splitlines() if "evaluation" in line]
    assert [row["values"]["evaluation"] for row in logged] == [value for _, value in first["evaluations"]]
    assert all((tmp_path / f"epoch-{number}").is_dir() for number in (1, 2, 3))
