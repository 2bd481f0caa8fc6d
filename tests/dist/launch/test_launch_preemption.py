"""Preemption for real: a launched training is told to stop, saves, is started again, and ends as if nothing had been."""

from __future__ import annotations

import os
import runpy
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

pytestmark = [pytest.mark.slow, pytest.mark.timed]

TRAIN: Final = """
import os, sys, time
import torch
from torch.utils.data import DataLoader, TensorDataset
from hasten import PREEMPTED_EXIT_CODE, Accelerator


def train(accelerator, pause=0.0):
    torch.manual_seed(4)
    model = torch.nn.Sequential(torch.nn.Linear(1, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 1))
    data = DataLoader(TensorDataset(torch.arange(800.0).reshape(-1, 1) / 400), batch_size=2, shuffle=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, data)
    if os.path.exists(f"{accelerator.project_dir}/checkpoints"):
        accelerator.load_state()
    seen = open(f"{accelerator.project_dir}/seen-{accelerator.process_index}", "a")
    for (x,) in loader:
        loss = model(x).pow(2).mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        print(x.flatten().tolist(), loss.item(), file=seen, flush=True)
        time.sleep(pause)
        if accelerator.preempted:
            accelerator.save_state()
            sys.exit(PREEMPTED_EXIT_CODE)
    weights = [p.flatten().tolist() for p in accelerator.unwrap_model(model).parameters()]
    print("end", weights, file=seen, flush=True)


if __name__ == "__main__":
    open(f"run/pid-{os.environ['RANK']}-{os.environ['TORCHELASTIC_RESTART_COUNT']}", "w").write(f"{os.getpid()}\\n")
    train(Accelerator(cpu=True, project_dir="run"), pause=0.05)
"""


def undisturbed(ctx: ProcessContext, script: str, folder: str) -> None:
    """The same training in the pool's processes: from the newest checkpoint, if there is one, to the end."""
    runpy.run_path(script)["train"](Accelerator(context=ctx, project_dir=folder))


@contextmanager
def launched(folder: Path) -> Iterator[subprocess.Popen[str]]:
    """A launcher of two processes with one restart."""
    words = ["launch", "--cpu", "--num_processes=2", "--max_restarts=1", "train.py"]
    env = {**os.environ, "HASTEN_HOME": str(folder), "HF_HOME": str(folder)}
    command = [sys.executable, "-m", "hasten.cli.main", *words]
    with subprocess.Popen(command, cwd=folder, env=env, stderr=subprocess.PIPE, text=True) as launcher:
        try:
            yield launcher
        finally:
            launcher.kill()


def wait_for_lines(file: Path, more_than: int) -> int:
    """How many lines a file has, once it has more than so many."""
    deadline = time.monotonic() + 60
    while (count := file.read_text().count("\n") if file.exists() else 0) <= more_than:
        assert time.monotonic() < deadline, f"{file} has {count} lines"
        time.sleep(0.01)
    return count


def test_a_training_told_to_stop_twice_ends_as_if_never_stopped(tmp_path: Path, rank_pool: Pool) -> None:
    script, run, whole = tmp_path / "train.py", tmp_path / "run", tmp_path / "whole"
    script.write_text(TRAIN)
    run.mkdir()
    whole.mkdir()
    rank_pool.run(undisturbed, 2, str(script), str(whole))
    with launched(tmp_path) as launcher:
        wait_for_lines(run / "seen-1", 2)
        os.kill(int((run / "pid-1-0").read_text()), signal.SIGUSR1)  # one worker: the run goes on by itself
        wait_for_lines(run / "pid-0-1", 0)
        wait_for_lines(run / "seen-0", (run / "seen-0").read_text().count("\n") + 2)
        launcher.send_signal(signal.SIGTERM)  # the launcher: all save, and whoever sent it starts the run again
        _, said = launcher.communicate(timeout=60)
    assert launcher.returncode == 85, said
    assert "exit code 85 means that the run saved a checkpoint and stopped after a signal" in said
    assert "restart 1 of 1" in said
    assert "SIGTERM: all processes of this machine have saved and exited; restart the job to continue" in said
    assert "end" not in (run / "seen-0").read_text()
    rank_pool.run(undisturbed, 2, str(script), str(run))
    for rank in range(2):
        assert (run / f"seen-{rank}").read_text() == (whole / f"seen-{rank}").read_text()
    assert len(list((run / "checkpoints").iterdir())) == 2
