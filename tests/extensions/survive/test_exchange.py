"""Exchange of gradients between replicas: weighted means bit by bit, missing gradients, lost members."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from hasten.errors import StepError
from hasten.extensions.survive.exchange import (
    LostReplicaError,
    ReplicaGroup,
    weighted_sum,
)
from hasten.runtime.context import ProcessContext
from hasten.testing import ranks


class Meeting:
    """A group of all ranks, as replicas form it."""

    def __init__(self, ctx: ProcessContext) -> None:
        self._store = (
            dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            if ctx.is_main
            else None
        )
        port = ctx.world.broadcast_object(
            None if self._store is None else self._store.port
        )
        self.group = ReplicaGroup(
            f"127.0.0.1:{port}", "test", ctx.rank, ctx.world.size, 5.0
        )
        self._ctx = ctx

    # Any: those of `receive`
    def average(
        self, parameters: Sequence[Tensor], *arguments: Any, **named: Any
    ) -> int:
        """Set the gradients to their mean; return what the replicas ask for."""
        received = self.group.receive_gradients(parameters, *arguments, **named)
        received.write_means()
        return received.request

    def close(self) -> None:
        """Close the group, then the store that it was formed at."""
        self.group.close()
        self._ctx.world.barrier("the groups are closed")


def parameters_of(rank: int, *shapes: tuple[int, ...]) -> list[Tensor]:
    """Return parameters with gradients that depend on the rank."""
    generator = torch.Generator().manual_seed(rank)
    parameters = [torch.zeros(shape, requires_grad=True) for shape in shapes]
    for parameter in parameters:
        parameter.grad = torch.randn(parameter.shape, generator=generator)
    return parameters


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
    for shapes in [
        ((3, 2), (5,)),
        ((200, 120), (7,)),
        ((200, 200), (7,), (90000,)),
    ]:  # copied, summed in slices, from their memory
        parameters = parameters_of(ctx.rank, *shapes)
        met.average(parameters, *weights[ctx.rank], (1.0,))
        everyone = [parameters_of(rank, *shapes) for rank in range(ctx.world.size)]
        for index, parameter in enumerate(parameters):
            expected_mean = weighted_sum(
                [gradient(rank_parameters[index]) for rank_parameters in everyone],
                factors,
            )
            assert torch.equal(gradient(parameter), expected_mean)
    met.close()


@ranks(2)
def test_missing_gradients_count_as_zero_and_stay_missing_if_no_replica_has_one(
    ctx: ProcessContext,
) -> None:
    parameters = parameters_of(ctx.rank, (2,), (2,), (2,))
    parameters[0].grad = None
    if ctx.rank == 0:
        parameters[1].grad = None
    met = Meeting(ctx)
    met.average(parameters, 1.0, 1.0, (1.0,))
    first, second, third = parameters
    assert first.grad is None
    assert third.grad is not None
    assert torch.equal(
        gradient(second), gradient(parameters_of(1, (2,), (2,), (2,))[1]) * 0.5
    )
    met.close()


@ranks(2)
def test_large_gradients_may_be_missing_or_lie_in_another_order(
    ctx: ProcessContext,
) -> None:
    """They are sent from their own memory if they lie there in one piece."""

    def made(rank: int) -> list[Tensor]:
        parameters = parameters_of(rank, (200, 200), (200, 200), (200, 200))
        parameters[0].grad = None
        if rank == 0:
            parameters[1].grad = None
        parameters[2].grad = gradient(parameters[2]).t()
        return parameters

    parameters, all_parameters = made(ctx.rank), [made(rank) for rank in range(2)]
    met = Meeting(ctx)
    for _ in range(2):
        met.average(parameters, 1.0, 1.0, (1.0,))
        assert parameters[0].grad is None
        assert torch.equal(
            gradient(parameters[1]), gradient(all_parameters[1][1]) * 0.5
        )
        expected_mean = weighted_sum(
            [
                gradient(rank_parameters[2]).contiguous()
                for rank_parameters in all_parameters
            ],
            [0.5, 0.5],
        )
        assert torch.equal(gradient(parameters[2]), expected_mean)
        for parameter, fresh in zip(parameters, made(ctx.rank), strict=True):
            parameter.grad = fresh.grad
    met.close()


@ranks(2, 3)
def test_a_change_of_the_gradients_after_backward_counts(ctx: ProcessContext) -> None:
    """Also one that torch does not notice."""
    shapes = (200, 200), (7,)
    parameters, everyone = (
        parameters_of(ctx.rank, *shapes),
        [parameters_of(rank, *shapes) for rank in range(ctx.world.size)],
    )
    for parameter in parameters:
        gradient(parameter).data.clamp_(-0.5, 0.5)
    met = Meeting(ctx)
    met.average(parameters, 1.0, 1.0, (1.0,))
    for index, parameter in enumerate(parameters):
        several = [
            gradient(rank_parameters[index]).clamp(-0.5, 0.5)
            for rank_parameters in everyone
        ]
        assert torch.equal(
            gradient(parameter),
            weighted_sum(several, [1.0 / ctx.world.size] * ctx.world.size),
        )
    met.close()


@ranks(2)
def test_replicas_in_different_updates_are_refused(ctx: ProcessContext) -> None:
    met = Meeting(ctx)
    with pytest.raises(StepError, match="Run the same script"):
        met.average(parameters_of(0, (2,)), 1.0, 1.0, (float(ctx.rank),))
    met.close()


@ranks(2)
def test_a_replica_that_leaves_in_the_exchange_is_noticed(ctx: ProcessContext) -> None:
    met = Meeting(ctx)
    if ctx.rank == 0:
        parameters = parameters_of(0, (2,))
        with pytest.raises(LostReplicaError):
            met.average(parameters, 1.0, 1.0, (1.0,))
        # for the next attempt
        assert torch.equal(gradient(parameters[0]), gradient(parameters_of(0, (2,))[0]))
    met.close()


@ranks(2)
def test_sparse_gradients_are_refused(ctx: ProcessContext) -> None:
    parameter = torch.zeros(2, 2, requires_grad=True)
    parameter.grad = torch.zeros(2, 2).to_sparse()
    met = Meeting(ctx)
    with pytest.raises(StepError, match="sparse=False"):
        met.average([parameter], 1.0, 1.0, (1.0,))
    met.close()


@ranks(2, 3)
def test_all_replicas_learn_that_one_wants_to_ask_for_the_members(
    ctx: ProcessContext,
) -> None:
    met = Meeting(ctx)
    last = ctx.world.size - 1
    for wishes in [(), (0,), (last,)]:
        parameters = parameters_of(ctx.rank, (2,))
        assert met.average(
            parameters, 1.0, 1.0, (1.0,), own_request=ctx.rank in wishes
        ) == bool(wishes)
    met.close()


@ranks(2)
def test_a_silent_replica_is_given_up_after_the_time_of_the_attempt(
    ctx: ProcessContext,
) -> None:
    met = Meeting(ctx)
    if ctx.rank == 0:
        met.group.timeout_s = 0.1  # the group itself waits 5 s
        with pytest.raises(LostReplicaError, match=r"(?i)time"):
            met.average(parameters_of(0, (2,)), 1.0, 1.0, (1.0,))
    ctx.world.barrier("the wait is over")
    met.close()
