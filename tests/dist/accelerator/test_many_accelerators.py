"""A search that makes an Accelerator for every trial keeps no thread, socket or Accelerator of the earlier ones."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hasten import Accelerator, ParallelismConfig
from hasten.runtime.context import ProcessContext
from hasten.testing.pool import ranks


def trial(**settings: Any) -> weakref.ref[Accelerator]:
    accelerator = Accelerator(cpu=True, **settings)
    net: nn.Module = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    net, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
    accelerator.backward(net(torch.ones(4, 8)).sum())
    optimizer.step()
    return weakref.ref(accelerator)


def held() -> tuple[Counter[str], int]:
    """The threads of this process by name, and the number of its open files."""
    gc.collect()
    names = []
    for task in Path("/proc/self/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):  # it has just ended
            names.append((task / "comm").read_text().strip())
    return Counter(names), len(list(Path("/proc/self/fd").iterdir()))


def watchers() -> list[str]:
    """The watchdog threads that are there; those that are about to end have five seconds, as a busy machine may need."""
    until = time.monotonic() + 5.0
    while (
        thread_names := [
            thread.name
            for thread in threading.enumerate()
            if thread.name.startswith("hasten-watchdog")
        ]
    ) and time.monotonic() < until:
        time.sleep(0.05)
    return thread_names


def collected(ref: weakref.ref[Accelerator]) -> bool:
    """Whether the Accelerator is gone; a collection that another thread has begun has five seconds to end."""
    until = time.monotonic() + 5.0
    while ref() is not None and time.monotonic() < until:
        gc.collect()  # returns at once while another thread collects
    return ref() is None


def more_than(earlier_threads: Counter[str]) -> Counter[str]:
    """Threads that are there besides the earlier ones; one that is about to end has five seconds."""
    until = time.monotonic() + 5.0
    while (extra_threads := held()[0] - earlier_threads) and time.monotonic() < until:
        time.sleep(0.05)
    return extra_threads


SETTINGS: dict[str, dict[str, Any]] = {
    "ddp": {"strategy": "ddp"},
    "fsdp": {"strategy": "fsdp"},
    "tensor": {
        "parallelism_config": ParallelismConfig(
            tp_size=2, tp_plan={"0": "colwise", "2": "rowwise"}
        ),
    },
}


@ranks(2)
@pytest.mark.parametrize("name", SETTINGS)
def test_a_trial_leaves_nothing_behind(ctx: ProcessContext, name: str) -> None:
    trial(**SETTINGS[name])  # makes the groups that all share
    threads, files = held()
    for _ in range(5):
        ref = trial(**SETTINGS[name])
        assert collected(ref), "the Accelerator is still alive"
    assert not watchers()
    assert not more_than(threads)
    assert held()[1] <= files + 1  # the listing itself may hold one
