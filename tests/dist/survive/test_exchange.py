"""Exchange of gradients between replicas: weighted means bit by bit, missing gradients, lost members."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from hasten.config.sections.launch import SurviveSettings
from hasten.errors import ConfigError, StepError
from hasten.runtime.context import ProcessContext
from hasten.survive.build import refuse_worlds
from hasten.survive.exchange import LostReplicaError, ReplicaGroup, weighted_sum
from hasten.testing import ranks


class Meeting:
    """A group of all ranks, as replicas form it."""

    def __init__(self, ctx: ProcessContext) -> None:
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) if ctx.is_main else None
        port = ctx.world.broadcast_object(None if self._store is None else self._store.port)
        self.group = ReplicaGroup(f"127.0.0.1:{port}", "test", ctx.rank, ctx.world.size, 5.0)
        self._ctx = ctx

    def close(self) -> None:
        """Close the group, then the store that it was formed at."""
        self.group.close()
        self._ctx.world.barrier("the groups are closed")


def parameters_of(rank: int, *shapes: tuple[int, ...]) -> list[Tensor]:
    """Return parameters with gradients that depend on the rank."""
    generator = torch.Generator().manual_seed(rank)
    made = [torch.zeros(shape, requires_grad=True) for shape in shapes]
    for parameter in made:
        parameter.grad = torch.randn(parameter.shape, generator=generator)
    return made


def gradient(parameter: Tensor) -> Tensor:
    """Return the gradient of a parameter that has one."""
    assert parameter.grad is not None
    return parameter.grad


@ranks(2, 3)
def test_the_mean_is_weighted_and_equal_bit_by_bit(ctx: ProcessContext) -> None:
    weights = [(3.0, 3.0), (5.0, 4.0), (2.0, 0.0)][: ctx.world.size]
    total = sum(share for _, share in weights)
    factors = [weight / total if share else 0.0 for weight, share in weights]
    met = Meeting(ctx)
    for shapes in [((3, 2), (5,)), ((200, 120), (7,))]:  # sent to all, and summed in parts
        found = met.group.mean(parameters_of(ctx.rank, *shapes), *weights[ctx.rank], (1.0,))
        everyone = [parameters_of(rank, *shapes) for rank in range(ctx.world.size)]
        for index, mean in enumerate(found):
            wanted = weighted_sum([gradient(one[index]) for one in everyone], factors)
            assert mean is not None
            assert torch.equal(mean, wanted)
    met.close()


@ranks(2)
def test_missing_gradients_count_as_zero_and_stay_missing_if_no_replica_has_one(ctx: ProcessContext) -> None:
    parameters = parameters_of(ctx.rank, (2,), (2,), (2,))
    parameters[0].grad = None
    if ctx.rank == 0:
        parameters[1].grad = None
    met = Meeting(ctx)
    first, second, third = met.group.mean(parameters, 1.0, 1.0, (1.0,))
    assert first is None
    assert second is not None
    assert third is not None
    assert torch.equal(second, gradient(parameters_of(1, (2,), (2,), (2,))[1]) * 0.5)
    met.close()


@ranks(2)
def test_replicas_in_different_updates_are_refused(ctx: ProcessContext) -> None:
    met = Meeting(ctx)
    with pytest.raises(StepError, match="Run the same script"):
        met.group.mean(parameters_of(0, (2,)), 1.0, 1.0, (float(ctx.rank),))
    met.close()


@ranks(2)
def test_a_replica_that_leaves_in_the_exchange_is_noticed(ctx: ProcessContext) -> None:
    met = Meeting(ctx)
    if ctx.rank == 0:
        with pytest.raises(LostReplicaError):
            met.group.mean(parameters_of(0, (2,)), 1.0, 1.0, (1.0,))
    met.close()


@ranks(2)
def test_sparse_gradients_are_refused(ctx: ProcessContext) -> None:
    parameter = torch.zeros(2, 2, requires_grad=True)
    parameter.grad = torch.zeros(2, 2).to_sparse()
    met = Meeting(ctx)
    with pytest.raises(StepError, match="sparse=False"):
        met.group.mean([parameter], 1.0, 1.0, (1.0,))
    met.close()


@ranks(2)
def test_a_replica_of_several_processes_is_refused(ctx: ProcessContext) -> None:
    with pytest.raises(ConfigError, match=r"replica left has 2 processes.*Start one process for each replica"):
        refuse_worlds(ctx, SurviveSettings(lighthouse="127.0.0.1:1", replica="left", replicas=2))
