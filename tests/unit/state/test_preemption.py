"""The preemption flag read elsewhere than on the main thread: it is said that signals are not noticed there."""

from __future__ import annotations

import logging
import signal
import threading

import pytest
import torch

from hasten.comm.local import LocalComm
from hasten.state.preemption import Preemption


def read_in_a_thread(preemption: Preemption) -> list[bool]:
    """What the flag says when a thread asks for it."""
    found: list[bool] = []
    thread = threading.Thread(
        target=lambda: found.append(preemption.agreed()), name="loop"
    )
    thread.start()
    thread.join()
    return found


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
