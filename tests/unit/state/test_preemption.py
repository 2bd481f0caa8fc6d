"""The preemption flag read elsewhere than on the main thread: it is said that signals are not noticed there."""

from __future__ import annotations

import logging
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from hasten.comm.local import LocalComm
from hasten.state.preemption import PREEMPTED_EXIT_CODE, Preemption


def read_in_a_thread(preemption: Preemption) -> list[bool]:
    """What the flag says when a thread asks for it."""
    agreements: list[bool] = []
    thread = threading.Thread(
        target=lambda: agreements.append(preemption.agreed()), name="loop"
    )
    thread.start()
    thread.join()
    return agreements


def test_a_thread_is_told_once_that_signals_are_not_noticed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    preemption = Preemption(LocalComm(torch.device("cpu")))
    with caplog.at_level(logging.WARNING):
        assert [read_in_a_thread(preemption), read_in_a_thread(preemption)] == [
            [False],
            [False],
        ]
    (record,) = caplog.records
    assert "in the thread 'loop'" in record.getMessage()
    assert "SIGTERM and SIGUSR1 are not noticed here" in record.getMessage()
    assert not preemption.listening


def test_a_thread_hears_what_the_main_thread_listens_for(
    caplog: pytest.LogCaptureFixture,
) -> None:
    preemption = Preemption(LocalComm(torch.device("cpu")))
    try:
        assert not preemption.agreed()
        signal.raise_signal(signal.SIGUSR1)
        assert read_in_a_thread(preemption) == [True]
        assert "not noticed" not in caplog.text
    finally:
        preemption.end()


_FIRST_WINDOW = """
import os, signal, sys
import torch
from torch.utils.data import DataLoader
from hasten import Accelerator
from hasten.state.preemption import PREEMPTED_EXIT_CODE

accelerator = Accelerator(cpu=True, project_dir=sys.argv[1], gradient_accumulation_steps=2)
net = torch.nn.Linear(1, 1)
loader = DataLoader(torch.ones(12, 1), batch_size=1)
model, optimizer, loader = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1), loader)
accelerator.load_state(must_exist=False)
for number, batch in enumerate(loader):
    if number == int(sys.argv[3]):
        os.kill(os.getpid(), getattr(signal, sys.argv[2]))
    with accelerator.accumulate(model):
        accelerator.backward(model(batch).sum())
        optimizer.step()
        optimizer.zero_grad()
    if "asks" in sys.argv and accelerator.sync_gradients and accelerator.preempted:
        accelerator.save_state()
        sys.exit(PREEMPTED_EXIT_CODE)
"""


@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1"])
def test_a_signal_in_the_first_window_is_noticed_by_a_loop_that_asks(
    tmp_path: Path, name: str
) -> None:
    def run(number: int, *options: str) -> int:
        command = [
            sys.executable,
            "-c",
            _FIRST_WINDOW,
            str(tmp_path),
            name,
            str(number),
            *options,
        ]
        return subprocess.run(
            command, capture_output=True, check=False, timeout=100
        ).returncode

    assert run(0, "asks") == PREEMPTED_EXIT_CODE
    assert run(0, "asks") == PREEMPTED_EXIT_CODE, "and after a resume"
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == [
        "checkpoint_0",
        "checkpoint_1",
    ]
    assert run(0) == -getattr(signal, name), "a loop that never asks ends as by default"
    assert run(4) == -getattr(signal, name)
