"""Logging and progress on an accelerator: values arrive, and the host is never made to wait in a step."""

from __future__ import annotations

import io
import re
import time

import pytest
import torch
from rich.console import Console

from hasten.progress.bar import BarContext, Progress
from hasten.progress.display import LineDisplay
from hasten.progress.meter import MemoryGauge
from hasten.progress.scalars import LateScalars, fetch_scalars
from hasten.progress.straggler import BackwardTimer
from hasten.tracking.base import Entry, Tracker
from hasten.tracking.manager import TrackerManager

pytestmark = pytest.mark.device


def device() -> torch.device:
    current_device = torch.accelerator.current_accelerator()
    assert current_device is not None
    return current_device


def slow_loss(matrix: torch.Tensor, times: int = 200) -> torch.Tensor:
    """A loss the device needs a while for; the call returns at once."""
    for _ in range(times):
        matrix = (matrix @ matrix).clamp(-1, 1)
    return matrix.mean() * 0 + 0.25


class ListTracker(Tracker):
    """Keeps what it gets."""

    name = "list"

    def __init__(self) -> None:
        self.entries: list[Entry] = []

    def log(self, entry: Entry) -> None:
        self.entries.append(entry)


def test_many_scalars_come_in_one_transfer() -> None:
    tensors = [torch.tensor(float(i), device=device()) for i in range(300)] + [
        torch.tensor(7)
    ]
    assert fetch_scalars(tensors) == [*map(float, range(300)), 7]


def test_reading_late_never_waits() -> None:
    matrix = torch.randn(4096, 4096, device=device())
    slow_loss(matrix)
    torch.accelerator.synchronize()
    late_scalars = LateScalars()
    late_scalars.store_values({"warm": torch.ones((), device=device())})
    late_scalars.read(wait=True)
    late_scalars.store_values({"loss": slow_loss(matrix)})
    start_s = time.perf_counter()
    late_scalars.read()
    assert "loss" not in late_scalars.read()
    read_s = time.perf_counter() - start_s
    assert late_scalars.read(wait=True)["loss"] == 0.25
    assert read_s < (time.perf_counter() - start_s) / 5, "reading waited for the device"


def test_logging_does_not_wait_and_loses_nothing() -> None:
    matrix, tracker = torch.randn(4096, 4096, device=device()), ListTracker()
    manager = TrackerManager([tracker], fetch=fetch_scalars, flush_every_s=1000.0)
    manager.init("project")
    manager.log({"loss": slow_loss(matrix)})  # the first one goes out at once
    start_s = time.perf_counter()
    for _ in range(5):
        manager.log({"loss": slow_loss(matrix)})
    logged_s = time.perf_counter() - start_s
    torch.accelerator.synchronize()
    done_s = time.perf_counter() - start_s
    manager.finish()
    assert logged_s < done_s / 2
    assert [entry.values["loss"] for entry in tracker.entries] == [0.25] * 6


def test_a_bar_shows_loss_memory_and_pace() -> None:
    matrix, file = torch.randn(512, 512, device=device()), io.StringIO()
    pulse = BackwardTimer(device(), every_s=0.0)
    bar_context = BarContext(
        display=LineDisplay(Console(file=file), 0.0),
        memory=MemoryGauge(device()),
        pulse=pulse,
    )
    bar = Progress(range(5), here=bar_context, desc="train")
    for _ in bar:
        loss = slow_loss(matrix, 20)
        pulse.backward()
        bar.show(loss=loss)
    assert "train 5/5 100% | loss 0.25" in file.getvalue().splitlines()[-1]
    assert re.search(r"mem \d", file.getvalue())
    assert pulse.take_mean() is not None
