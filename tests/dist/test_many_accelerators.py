"""A search that makes an Accelerator for every trial keeps no thread, socket or Accelerator of the earlier ones."""

from __future__ import annotations

import gc
import threading
import weakref
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


def held() -> dict[str, int]:
    gc.collect()
    return {kind: len(list(Path(f"/proc/self/{kind}").iterdir())) for kind in ("task", "fd")}


SETTINGS: dict[str, dict[str, Any]] = {
    "ddp": {"strategy": "ddp"},
    "fsdp": {"strategy": "fsdp"},
    "tensor": {
        "parallelism_config": ParallelismConfig(tp_size=2, tp_plan={"0": "colwise", "2": "rowwise"}),
    },
}


@ranks(2)
@pytest.mark.parametrize("name", SETTINGS)
def test_a_trial_leaves_nothing_behind(ctx: ProcessContext, name: str) -> None:
    trial(**SETTINGS[name])  # makes the groups that all share
    before = held()
    for _ in range(5):
        ref = trial(**SETTINGS[name])
        gc.collect()
        assert ref() is None, "the Accelerator is still alive"
    watchers = [thread.name for thread in threading.enumerate() if thread.name.startswith("hasten-watchdog")]
    assert not watchers
    after = held()
    assert after["task"] <= before["task"]
    assert after["fd"] <= before["fd"] + 1  # the listing itself may hold one
