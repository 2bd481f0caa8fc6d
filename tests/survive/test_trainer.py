"""A Trainer whose replicas are killed: its samples, weights, evaluations, callbacks and checkpoints."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hasten.checkpoint.store.locate import newest, open_store
from tests.survive.checking import check_run
from tests.survive.driving import (
    HERE,
    finish,
    options_of,
    recent,
    search_path,
    wait_for,
)
from tests.survive.reading import results

pytestmark = pytest.mark.timeout(3000)  # processes that load torch, some of them again
LIMIT_S = 400.0


def start(folder: Path, options: dict[str, object]) -> subprocess.Popen[str]:
    """Start two replicas of the Trainer."""
    command = [sys.executable, "-m", "hasten", "launch", "--cpu", "--replicas", "2"]
    command += [str(HERE / "trainer_program.py"), str(folder), json.dumps(options)]
    with (folder / "out.txt").open("w") as out:
        return subprocess.Popen(
            command, stdout=out, stderr=subprocess.STDOUT, text=True, start_new_session=True,
            env={**os.environ, "PYTHONPATH": search_path()},
        )  # fmt: skip


@pytest.mark.parametrize("name", ["0", "1"])
def test_a_trainer_survives_the_loss_of_a_replica(tmp_path: Path, name: str) -> None:
    options = options_of({"size": 600, "epochs": 3})
    run = start(tmp_path, options)
    found = wait_for(run, tmp_path, 2)
    store = open_store(str(tmp_path / "trained" / "checkpoints"))
    while newest(store) is None and run.poll() is None:
        time.sleep(0.02)  # then it is the second epoch
    (tmp_path / "slow").touch()
    os.kill(found[name], signal.SIGKILL)
    while (
        recent(tmp_path, 2.0).get(name, found[name]) == found[name]
        and run.poll() is None
    ):
        time.sleep(0.05)
    (tmp_path / "slow").unlink()
    finish(run, tmp_path, LIMIT_S)
    updates = check_run(tmp_path, options)
    both = results(tmp_path)
    assert sorted(both) == ["0", "1"]
    assert both[name]["healed"]
    for result in both.values():
        assert result["global_step"] == len(updates)
        assert (result["epochs_done"], result["epoch"], result["counted"]) == (
            3,
            3.0,
            3,
        )
        assert len(result["evaluations"]) == 3
        assert result["evaluations"] == both["1"]["evaluations"]
        assert result["best_step"] == both["0"]["best_step"]
    ends = [
        max(update["step"] for update in updates if update["epoch"] == epoch)
        for epoch in range(3)
    ]
    assert [store.manifest(one).step for one in sorted(store.names())] == ends
    values = both["0"]["evaluations"]
    assert both["0"]["best_step"] == ends[values.index(max(values))]
