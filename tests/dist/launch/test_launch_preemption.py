"""Preemption for real: a launched training is told to stop, saves, is started again, and ends as if nothing had been."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import pytest

from hasten import Accelerator
from hasten.runtime.context import ProcessContext
from hasten.testing.pool import Pool
from tests.support.preemptible import train

pytestmark = [pytest.mark.slow, pytest.mark.timed, pytest.mark.timeout(300)]

TRAIN: Final = Path(__file__).parents[2] / "support" / "preemptible.py"
SAMPLES: Final = 800


def undisturbed(ctx: ProcessContext, folder: str) -> None:
    """The same training in the pool's processes: from the newest checkpoint, if there is one, to the end."""
    train(Accelerator(context=ctx, project_dir=folder), SAMPLES)


@contextmanager
def launched(folder: Path) -> Iterator[subprocess.Popen[str]]:
    """A launcher of two processes with one restart."""
    words = [
        "launch",
        "--cpu",
        "--num_processes=2",
        "--max_restarts=1",
        str(TRAIN),
        str(SAMPLES),
        "0.05",
        "0",
    ]
    env = {**os.environ, "HASTEN_HOME": str(folder), "HF_HOME": str(folder)}
    command = [sys.executable, "-m", "hasten.cli.main", *words]
    with subprocess.Popen(
        command, cwd=folder, env=env, stderr=subprocess.PIPE, text=True
    ) as launcher:
        try:
            yield launcher
        finally:
            launcher.kill()


def wait_for_lines(file: Path, more_than: int) -> int:
    """How many lines a file has, once it has more than so many."""
    deadline = time.monotonic() + 240
    while (count := file.read_text().count("\n") if file.exists() else 0) <= more_than:
        assert time.monotonic() < deadline, f"{file} has {count} lines"
        time.sleep(0.01)
    return count


def test_a_training_told_to_stop_twice_ends_as_if_never_stopped(
    tmp_path: Path, rank_pool: Pool
) -> None:
    run, undisturbed_folder = tmp_path / "run", tmp_path / "whole"
    run.mkdir()
    undisturbed_folder.mkdir()
    rank_pool.run(undisturbed, 2, str(undisturbed_folder))
    with launched(tmp_path) as launcher:
        wait_for_lines(run / "seen-1", 2)
        # one worker: the run goes on by itself
        os.kill(int((run / "pid-1-0").read_text()), signal.SIGUSR1)
        wait_for_lines(run / "pid-0-1", 0)
        wait_for_lines(run / "seen-0", (run / "seen-0").read_text().count("\n") + 2)
        # the launcher: all save, and whoever sent it starts the run again
        launcher.send_signal(signal.SIGTERM)
        _, launcher_errors = launcher.communicate(timeout=240)
    assert launcher.returncode == 85, launcher_errors
    assert (
        "exit code 85 means that the run saved a checkpoint and stopped after a signal"
        in launcher_errors
    )
    assert "restart 1 of 1" in launcher_errors
    assert (
        "SIGTERM: all processes of this machine have saved and exited; restart the job to continue"
        in launcher_errors
    )
    assert "end" not in (run / "seen-0").read_text()
    rank_pool.run(undisturbed, 2, str(run))
    for rank in range(2):
        assert (run / f"seen-{rank}").read_text() == (
            undisturbed_folder / f"seen-{rank}"
        ).read_text()
    assert len(list((run / "checkpoints").iterdir())) == 2
