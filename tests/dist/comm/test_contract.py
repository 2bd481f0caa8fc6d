"""Debug mode: collectives that do not match are refused before they run, on every rank, with every rank's call."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from hasten import Accelerator
from hasten.comm.collective_log import CollectiveRecord
from hasten.comm.process_group import ProcessGroupComm
from hasten.errors import MismatchError, MissingRanksError
from hasten.runtime.context import ProcessContext
from hasten.testing.pool import ranks


def checked(ctx: ProcessContext, timeout_s: float = 30.0) -> ProcessGroupComm:
    """A communicator of the world that checks every collective."""
    world = ctx.world
    assert isinstance(world, ProcessGroupComm)
    return ProcessGroupComm(
        world.group, world.store, ctx.device, timeout_s, collectives=CollectiveRecord(), checked=True
    )


@ranks(2, 4)
def test_what_differs_is_refused_on_every_rank(ctx: ProcessContext) -> None:
    comm = checked(ctx)
    odd = ctx.rank == 1
    calls: list[Callable[[], Tensor]] = [
        lambda: comm.broadcast(torch.ones(2)) if odd else comm.all_reduce(torch.ones(2)),
        lambda: comm.all_gather(torch.ones(3 if odd else 2)),
        lambda: comm.all_gather(torch.ones(2, dtype=torch.float64 if odd else torch.float32)),
    ]
    for call in calls:
        with pytest.raises(MismatchError, match="about to run different collectives") as caught:
            call()
        assert "test_contract.py:" in str(caught.value)
        assert "rank 1: " in str(caught.value)
        dist.barrier()
    assert comm.all_reduce(torch.ones(1)).item() == comm.size  # the group is still in order


@ranks(2)
def test_equal_calls_pass_and_give_the_same(ctx: ProcessContext) -> None:
    comm, plain = checked(ctx), ctx.world
    x = torch.arange(6.0).reshape(2, 3) + ctx.rank
    for _ in range(5):  # old agreements are deleted on the way
        assert torch.equal(comm.all_reduce(x), plain.all_reduce(x))
        assert torch.equal(comm.all_gather(x), plain.all_gather(x))
        assert torch.equal(comm.broadcast(x, 1), plain.broadcast(x, 1))
        assert comm.all_gather_object({"rank": ctx.rank}) == [{"rank": 0}, {"rank": 1}]


@ranks(3)
def test_a_call_on_some_ranks_names_the_missing(ctx: ProcessContext) -> None:
    comm = checked(ctx, timeout_s=0.5)
    if ctx.rank != 2:
        with pytest.raises(MissingRanksError, match=r"ranks \[2\] did not come") as caught:
            comm.all_reduce(torch.ones(2))
        assert caught.value.missing == (2,)


@ranks(2)
def test_the_same_call_from_another_line_is_a_warning(ctx: ProcessContext) -> None:
    comm = checked(ctx)
    for _ in range(2):
        if ctx.rank:
            comm.all_reduce(torch.ones(2))
        else:
            comm.all_reduce(torch.ones(2))
    assert comm._contract is not None
    assert len(comm._contract._warned) == (ctx.rank == 0)


@ranks(2)
def test_debug_mode_checks_and_watches(ctx: ProcessContext) -> None:
    """With a context of its own an Accelerator watches when asked, and its thread ends with it."""
    accelerator = Accelerator(context=ctx, trust={"stall": "report", "stall_after_s": 60.0})
    assert accelerator.gather(torch.ones(1)).tolist() == [1.0, 1.0]
    del accelerator
