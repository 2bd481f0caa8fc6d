"""The ranks of one replica: decisions of the first, votes, heartbeats, worlds that are refused, and shards that another replica receives."""

from __future__ import annotations

import copy
import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hasten import Accelerator
from hasten.accelerator.components import components
from hasten.errors import ConfigError, HastenError
from hasten.extensions.survive import healing
from hasten.extensions.survive.exchange import Bucket
from hasten.extensions.survive.inside import Inside
from hasten.extensions.survive.part import refuse_meshes
from hasten.extensions.survive.run_state import RunState, to_dtensors
from hasten.extensions.survive.settings import SurviveSettings
from hasten.runtime.context import ProcessContext
from hasten.testing import ranks

SETTINGS = SurviveSettings(
    lighthouse="127.0.0.1:1", replica="left", replicas=2, heartbeat_timeout_s=0.8
)


@ranks(2, 3)
def test_the_ranks_follow_the_first_and_vote(ctx: ProcessContext) -> None:
    inside = Inside(ctx.world, "127.0.0.1", SETTINGS)
    for number in range(20):
        if inside.is_first:
            time.sleep(0.5 if number == 3 else 0.0)
            inside.send_decision({"number": number})
        else:
            assert inside.receive_decision() == {"number": number}
    assert inside.vote(True)
    assert not inside.vote(ctx.rank > 0)
    assert not inside.vote(False)
    assert inside.sum_over_ranks(ctx.rank + 1.0) == sum(range(1, ctx.world.size + 1))
    ctx.world.barrier("all have voted")
    inside.close()


@ranks(2)
def test_a_rank_that_is_silent_is_noticed_by_the_first(ctx: ProcessContext) -> None:
    inside = Inside(ctx.world, "127.0.0.1", SETTINGS)
    time.sleep(0.2)
    if inside.is_first:
        assert inside.has_live_ranks()
    ctx.world.barrier("the heartbeats were seen")
    if not inside.is_first:
        inside.close()
    ctx.world.barrier("the second rank is silent")
    if inside.is_first:
        until = time.monotonic() + 10.0
        while inside.has_live_ranks() and time.monotonic() < until:
            time.sleep(0.05)
        assert not inside.has_live_ranks()
    ctx.world.barrier("its silence was noticed")
    inside.close()


def trained(
    ctx: ProcessContext, steps: int, strategy: Any
) -> tuple[RunState, list[Tensor], Any]:
    """Return a prepared model's state after some updates, its parameters and its optimizer."""
    accelerator = Accelerator(context=ctx, cpu=True, strategy=strategy)
    torch.manual_seed(steps)
    model = nn.Sequential(
        nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 1)
    )  # three rows and one: shards of unequal length
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    for _ in range(steps):
        accelerator.backward(model(torch.randn(4, 3)).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    state = RunState(components(accelerator).prepared, accelerator.unwrap_model)
    return state, list(model.parameters()), optimizer.optimizer


def values(state: RunState) -> bytes:
    """Return everything that a state holds on this rank."""
    return healing.pack_state(state.collect_state())


@ranks(2, mesh={"dp_shard": 2})
def test_a_rank_receives_the_shards_of_the_same_rank_of_another_replica(
    ctx: ProcessContext,
) -> None:
    source, _, _ = trained(ctx, 3, "fsdp")
    target, parameters, optimizer = trained(ctx, 0, "fsdp")
    assert all(hasattr(parameter, "to_local") for parameter in parameters)
    state = source.collect_state()
    target.load_state(copy.deepcopy(state))
    assert values(target) == values(source)
    assert all(
        hasattr(parameter_state["exp_avg"], "to_local")
        for parameter_state in optimizer.state.values()
    )


@ranks(2)
def test_a_replica_with_whole_models_is_healed_as_well(ctx: ProcessContext) -> None:
    source, _, _ = trained(ctx, 3, "ddp")
    target, _, _ = trained(ctx, 0, "ddp")
    target.load_state(copy.deepcopy(source.collect_state()))
    assert values(target) == values(source)


@ranks(2, mesh={"dp_shard": 2})
def test_a_shard_of_another_shape_is_refused(ctx: ProcessContext) -> None:
    _, parameters, _ = trained(ctx, 0, "fsdp")
    with pytest.raises(
        HastenError, match=r"a shard of shape \(7,\).*same number of processes"
    ):
        to_dtensors(
            {"weight": {"hasten_local_shard": torch.zeros(7)}},
            {"weight": parameters[0]},
        )


@ranks(2, mesh={"dp_shard": 2})
def test_gradients_of_shards_are_sent_from_local_memory(ctx: ProcessContext) -> None:
    _, parameters, _ = trained(ctx, 0, "fsdp")
    gradients: list[Any] = []
    for parameter in parameters:
        parameter.grad = torch.full_like(parameter, float(ctx.rank + 1))
        gradients.append(parameter.grad)
    bucket = Bucket(parameters, rank=0, size=2, tag=1)
    sent, _ = bucket.copy_gradients()
    assert set(torch.cat(sent).tolist()) - {0.0} == {ctx.rank + 1.0}
    bucket.sent.mul_(2.5)
    bucket.write_means([True] * len(parameters))
    for gradient in gradients:
        assert torch.equal(
            gradient.to_local(),
            torch.full_like(gradient.to_local(), 2.5 * (ctx.rank + 1)),
        )


@ranks(2)
def test_ranks_of_a_replica_may_hold_the_whole_model(ctx: ProcessContext) -> None:
    refuse_meshes(ctx, SETTINGS)


@ranks(2, mesh={"tp": 2})
def test_ranks_that_divide_tensors_are_refused(ctx: ProcessContext) -> None:
    with pytest.raises(
        ConfigError,
        match=r"replica left has 2 processes in a mesh of tp 2.*let --replicas take the place",
    ):
        refuse_meshes(ctx, SETTINGS)
