"""Memory follows 1/world: one rank of 8, 64 and 1024, simulated on a fake process group and measured by torch's tracker."""

from __future__ import annotations

import gc

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._tools.mem_tracker import MemTracker
from torch.testing._internal.distributed import fake_pg

from hasten import Accelerator
from hasten.runtime.context import ProcessContext
from hasten.testing.pool import ranks

WIDTH = 1024


def model() -> nn.Module:
    """Two blocks whose every dimension is a multiple of 1024, so that shards are even at every world size here."""
    return nn.Sequential(
        *(
            nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH))
            for _ in range(2)
        )
    )


def sharded_bytes(world_size: int) -> int:
    """Bytes of parameters, gradients and optimizer state that one of `world_size` ranks holds between two steps."""
    assert fake_pg.__name__, "importing it registers the backend"
    dist.init_process_group(
        "fake", store=dist.HashStore(), rank=0, world_size=world_size
    )
    try:
        return held_bytes("fsdp")
    finally:
        gc.collect()
        dist.destroy_process_group()


def held_bytes(strategy: str) -> int:
    accelerator = Accelerator(strategy=strategy)
    net = model()
    net, optimizer = accelerator.prepare(
        net, torch.optim.AdamW(net.parameters(), foreach=False)
    )
    tracker = MemTracker()
    tracker.track_external(net, optimizer.optimizer)
    with tracker:
        accelerator.backward(net(torch.randn(1, WIDTH)).sum())
        optimizer.step()
    snapshot = tracker.get_tracker_snapshot("current")[torch.device("cpu")]
    return sum(
        number
        for kind, number in snapshot.items()
        if kind in ("Parameter", "Gradient", "Optstate")
    )


@ranks(1)
@pytest.mark.slow
def test_parameters_gradients_and_optimizer_follow_one_over_world(
    ctx: ProcessContext,
) -> None:
    # weight, gradient and two moments in float32
    full_bytes = sum(p.numel() for p in model().parameters()) * 4 * 4
    # what every rank of DDP holds too, before its buckets
    replicated = held_bytes("none")
    assert replicated >= full_bytes * 0.99
    assert sharded_bytes(4) <= replicated * 0.4  # at four devices at least 60 % less
    for world_size in (8, 64, 1024):
        share = sharded_bytes(world_size) * world_size / full_bytes
        assert 0.95 <= share <= 1.05, f"world {world_size}: {share:.3f} of the ideal"
