"""The pool and the random states on an accelerator: the same functions as on the CPU."""

from __future__ import annotations

import re

import pytest
import torch

from hasten.runtime.context import ProcessContext
from hasten.runtime.devices import pci_address
from hasten.runtime.seeding import RngState, set_seed, synchronize_rng_states
from hasten.testing.pool import ranks

pytestmark = pytest.mark.device


@ranks(1, 2, device="cuda")
def test_ranks_meet_with_tensors_on_the_device(ctx: ProcessContext) -> None:
    assert ctx.device.type == "cuda"
    total = ctx.world.all_reduce(
        torch.full((3,), float(ctx.rank + 1), device=ctx.device)
    )
    assert total.device == ctx.device
    assert total.tolist() == [sum(range(1, ctx.world.size + 1))] * 3


@ranks(1, 2, device="cuda")
def test_state_of_the_device_generator_is_restored(ctx: ProcessContext) -> None:
    set_seed(3, device_specific=True)
    torch.rand(5, device=ctx.device)
    state = RngState.capture(ctx.device)
    expected = torch.rand(4, device=ctx.device), torch.rand(4)
    set_seed(9)
    RngState.from_tree(state.tree).restore(ctx.device)
    assert torch.equal(torch.rand(4, device=ctx.device), expected[0])
    assert torch.equal(torch.rand(4), expected[1])


@ranks(2, device="cuda")
def test_device_generators_are_synchronized(ctx: ProcessContext) -> None:
    set_seed(3, device_specific=True)
    synchronize_rng_states(["cuda"], ctx.world)
    drawn = ctx.world.all_gather(torch.rand(4, device=ctx.device))
    assert torch.equal(drawn[0], drawn[1])
    host_draws = ctx.world.all_gather(torch.rand(4))
    assert not torch.equal(host_draws[0], host_draws[1])


@ranks(1, device="cuda")
def test_deterministic_mode_holds_on_the_device(ctx: ProcessContext) -> None:
    set_seed(1, deterministic=True)
    a = torch.randn(64, 64, device=ctx.device)
    assert torch.equal(a @ a, a @ a)
    with pytest.raises(RuntimeError, match="deterministic"):
        torch.zeros(4, device=ctx.device).put_(
            torch.tensor([0, 0], device=ctx.device), a[0, :2]
        )


@ranks(1, device="cuda")
def test_device_is_found_on_the_bus(ctx: ProcessContext) -> None:
    address = pci_address(ctx.device)
    assert address is not None
    assert re.fullmatch(r"[0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.0", address)
