"""Replicas that are told to stop: all of them save at the same update, one alone leaves, and a resumed run uses the rest of the samples."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from tests.survive.checking import check_run
from tests.survive.driving import close, finish, options_of, recent, start, wait_for
from tests.survive.reading import rows

pytestmark = pytest.mark.timeout(3000)  # processes that load torch, some of them again
LIMIT_S = 400.0
PREEMPTED = 85


def left(folder: Path) -> list[tuple[int, str]]:
    """Return the update after which each preempted replica left, and the checkpoint that it saved."""
    return [tuple(json.loads(path.read_text())) for path in folder.glob("left-*.json")]


def code_of(run: subprocess.Popen[str]) -> int:
    """Return the launcher's exit code."""
    return run.wait(LIMIT_S)


@pytest.mark.parametrize(
    ("number", "flags"),
    [(signal.SIGTERM, ["--min_replicas", "3"]), (signal.SIGUSR1, [])],
)
def test_a_signal_to_the_launcher_saves_once_and_the_run_resumes(
    tmp_path: Path, number: int, flags: list[str]
) -> None:
    options = options_of(
        {"size": 202, "open": True, "sleep": 0.03, "preemptible": True}
    )
    run = start(tmp_path, 3, options, *flags)
    assert wait_for(run, tmp_path, 3)
    for _ in range(2):  # schedulers repeat the signal
        run.send_signal(number)
        time.sleep(0.02)
    assert code_of(run) == PREEMPTED, (tmp_path / "out.txt").read_text()[-3000:]
    left_replicas = left(tmp_path)
    assert len(left_replicas) == 3
    assert len({step for step, _ in left_replicas}) == 1  # the same update
    assert sum(bool(checkpoint_path) for _, checkpoint_path in left_replicas) == 1
    options["epochs"] = close(tmp_path)
    finish(start(tmp_path, 3, options, *flags), tmp_path, LIMIT_S)
    check_run(tmp_path, options)


def test_a_replica_that_is_being_started_does_not_change_the_exit_code(
    tmp_path: Path,
) -> None:
    """It has no handler yet, so the signal ends it; the others save."""
    options = options_of(
        {"size": 202, "open": True, "sleep": 0.04, "preemptible": True}
    )
    run = start(tmp_path, 2, options)
    pids = wait_for(run, tmp_path, 2)
    os.kill(pids["1"], signal.SIGKILL)
    until = time.monotonic() + 60.0
    while (
        "the replica is started again" not in (tmp_path / "out.txt").read_text()
        and time.monotonic() < until
    ):
        time.sleep(0.01)
    time.sleep(0.2)
    run.send_signal(signal.SIGTERM)
    assert code_of(run) == PREEMPTED, (tmp_path / "out.txt").read_text()[-3000:]
    assert [bool(checkpoint_path) for _, checkpoint_path in left(tmp_path)] == [True]
    options["epochs"] = close(tmp_path)
    finish(start(tmp_path, 2, options), tmp_path, LIMIT_S)
    check_run(tmp_path, options)


def test_a_signal_to_one_replica_lets_it_leave_while_the_others_continue(
    tmp_path: Path,
) -> None:
    options = options_of(
        {"size": 202, "open": True, "sleep": 0.04, "preemptible": True}
    )
    run = start(tmp_path, 3, options)
    pids = wait_for(run, tmp_path, 3)
    os.kill(pids["1"], signal.SIGTERM)
    while "the replica is started again" not in (
        tmp_path / "out.txt"
    ).read_text() or "1" not in recent(tmp_path):
        assert run.poll() is None
        time.sleep(0.05)
    options["epochs"] = close(tmp_path)
    text = finish(run, tmp_path, LIMIT_S)
    updates: list[dict[str, Any]] = check_run(tmp_path, options)
    assert (
        "rank 0 of replica 1 ended with exit code 85; the replica is started again, 2 continue"
        in text
    )
    ((step, checkpoint_path),) = left(tmp_path)
    assert checkpoint_path == ""  # it did not lead
    assert any(
        row["step"] == step and row["applied"]
        for row in rows(tmp_path)
        if row["name"] == "1"
    )
    without = [update for update in updates if "1" not in update["contributors"]]
    assert without
    assert min(update["step"] for update in without) == step + 1
