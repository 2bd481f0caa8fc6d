"""Loops with evaluation, metrics, a tracker and checkpoints, whose replicas come and go."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hasten.checkpoint.base import CheckpointStore
from hasten.checkpoint.format.manifest import Manifest
from hasten.checkpoint.store.local_store import open_store
from hasten.errors import CheckpointError
from tests.survive.driving import SURVIVE_TESTS, finish, recent, wait_for
from tests.survive.reading import results

pytestmark = pytest.mark.timeout(3000)  # processes that load torch, some of them again
LIMIT_S = 600.0


def start(folder: Path, epochs: int, *flags: str) -> subprocess.Popen[str]:
    """Start two replicas of the program."""
    command = [
        sys.executable,
        "-m",
        "hasten",
        "launch",
        "--cpu",
        "--replicas",
        "2",
        *flags,
    ]
    command += [str(SURVIVE_TESTS / "whole_program.py"), str(folder), str(epochs)]
    path = os.pathsep.join([str(SURVIVE_TESTS.parents[1]), *filter(None, sys.path)])
    with (folder / "out.txt").open("w") as out:
        return subprocess.Popen(
            command,
            stdout=out,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            env={**os.environ, "PYTHONPATH": path},
        )


def test_evaluations_trackers_and_checkpoints_continue_when_a_replica_is_lost(
    tmp_path: Path,
) -> None:
    run = start(tmp_path, 3)
    pids = wait_for(run, tmp_path, 2)
    os.kill(pids["1"], signal.SIGKILL)
    finish(run, tmp_path, LIMIT_S)
    first = results(tmp_path)["0"]
    # the whole of it, on each replica
    assert [number for number, _ in first["evaluations"]] == [22, 22, 22]
    assert all(
        replica_outcome["weights"] == first["weights"]
        for replica_outcome in results(tmp_path).values()
    )
    assert all(
        replica_outcome["evaluations"][-1] == first["evaluations"][-1]
        for replica_outcome in results(tmp_path).values()
    )
    (metrics,) = tmp_path.glob("project/**/metrics.jsonl")
    logged = [
        json.loads(line)
        for line in metrics.read_text().splitlines()
        if "evaluation" in line
    ]
    assert [row["values"]["evaluation"] for row in logged] == [
        value for _, value in first["evaluations"]
    ]
    assert all((tmp_path / f"epoch-{number}").is_dir() for number in (1, 2, 3))


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_the_same_holds_for_replicas_of_two_processes(
    tmp_path: Path, strategy: str
) -> None:
    """`gather_for_metrics` sees the whole evaluation over the ranks of a replica, and all ranks of one replica save together."""
    run = start(tmp_path, 3, "--num_processes", "4", "--strategy", strategy)
    pids = wait_for(run, tmp_path, 4)
    os.kill(pids["1.1"], signal.SIGKILL)
    finish(run, tmp_path, LIMIT_S)
    every = results(tmp_path)
    first = every["0.0"]
    assert {"0.0", "0.1"} <= set(every)
    assert [number for number, _ in first["evaluations"]] == [22, 22, 22]
    assert all(
        replica_outcome["weights"] == first["weights"]
        for replica_outcome in every.values()
    )
    assert all(
        replica_outcome["evaluations"][-1] == first["evaluations"][-1]
        for replica_outcome in every.values()
    )
    assert [
        name for name, replica_outcome in every.items() if replica_outcome["leads"]
    ] == ["0.0"]
    store = open_store(str(tmp_path))
    steps = [store.manifest(f"epoch-{number}").step or 0 for number in (1, 2, 3)]
    assert steps == sorted(set(steps))
    (metrics,) = tmp_path.glob("project/**/metrics.jsonl")
    logged = [
        json.loads(line)
        for line in metrics.read_text().splitlines()
        if "evaluation" in line
    ]
    assert [row["values"]["evaluation"] for row in logged] == [
        value for _, value in first["evaluations"]
    ]


def manifest_of(store: CheckpointStore, name: str) -> Manifest | None:
    """Return the manifest of a checkpoint; None before it is complete."""
    try:
        return store.manifest(name)
    except (CheckpointError, OSError):
        return None


def test_a_returning_leader_replaces_no_checkpoint_of_a_completed_epoch(
    tmp_path: Path,
) -> None:
    """It runs the script from its beginning, with calls of save_state and log for epochs that the run has completed."""
    run = start(tmp_path, 4)
    pids = wait_for(run, tmp_path, 2)
    store = open_store(str(tmp_path))
    while (
        first_manifest := manifest_of(store, "epoch-1")
    ) is None and run.poll() is None:
        time.sleep(0.02)
    (tmp_path / "slow").touch()
    os.kill(pids["0"], signal.SIGKILL)
    while recent(tmp_path, 2.0).get("0", pids["0"]) == pids["0"] and run.poll() is None:
        time.sleep(0.05)
    (tmp_path / "slow").unlink()
    finish(run, tmp_path, LIMIT_S)
    assert store.manifest("epoch-1") == first_manifest
    steps = [store.manifest(f"epoch-{number}").step or 0 for number in (1, 2, 3, 4)]
    assert steps == sorted(set(steps))
    replica_outcomes = results(tmp_path)
    assert replica_outcomes["0"]["weights"] == replica_outcomes["1"]["weights"]
    assert replica_outcomes["0"]["leads"]  # again, after its first update
    values = [value for _, value in replica_outcomes["1"]["evaluations"]]
    for path in tmp_path.glob("project/**/metrics.jsonl"):
        for row in map(
            json.loads,
            filter(lambda line: "evaluation" in line, path.read_text().splitlines()),
        ):
            assert row["values"]["evaluation"] == values[row["step"] - 1]
