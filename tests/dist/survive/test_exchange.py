"""Exchange of gradients between replicas: weighted means bit by bit, missing gradients, lost members."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from hasten.errors import StepError
from hasten.runtime.context import ProcessContext
from hasten.survive.early import EarlySender
from hasten.survive.exchange import Bucket, LostReplicaError, ReplicaGroup, weighted_sum
from hasten.testing import ranks


class Meeting:
    """A group of all ranks, as replicas form it."""

    def __init__(self, ctx: ProcessContext) -> None:
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) if ctx.is_main else None
        port = ctx.world.broadcast_object(None if self._store is None else self._store.port)
        self.group = ReplicaGroup(f"127.0.0.1:{port}", "test", ctx.rank, ctx.world.size, 5.0)
        self._ctx = ctx

    def average(self, parameters: Sequence[Tensor], *given: Any, **named: Any) -> int:  # Any: those of `receive`
        """Set the gradients to their mean; return what the replicas ask for."""
        received = self.group.receive(parameters, *given, **named)
        received.write()
        return received.asks

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


def is_sent(bucket: Bucket) -> bool:
    """Return True if the messages of a bucket are under way."""
    return bucket.works is not None


@ranks(2, 3)
def test_the_mean_is_weighted_and_equal_bit_by_bit(ctx: ProcessContext) -> None:
    weights = [(3.0, 3.0), (5.0, 4.0), (2.0, 0.0)][: ctx.world.size]
    total = sum(share for _, share in weights)
    factors = [weight / total if share else 0.0 for weight, share in weights]
    met = Meeting(ctx)
    for shapes in [((3, 2), (5,)), ((200, 120), (7,))]:  # sent to all, and summed in parts
        parameters = parameters_of(ctx.rank, *shapes)
        met.average(parameters, *weights[ctx.rank], (1.0,))
        everyone = [parameters_of(rank, *shapes) for rank in range(ctx.world.size)]
        for index, parameter in enumerate(parameters):
            wanted = weighted_sum([gradient(one[index]) for one in everyone], factors)
            assert torch.equal(gradient(parameter), wanted)
    met.close()


@ranks(2)
def test_missing_gradients_count_as_zero_and_stay_missing_if_no_replica_has_one(ctx: ProcessContext) -> None:
    parameters = parameters_of(ctx.rank, (2,), (2,), (2,))
    parameters[0].grad = None
    if ctx.rank == 0:
        parameters[1].grad = None
    met = Meeting(ctx)
    met.average(parameters, 1.0, 1.0, (1.0,))
    first, second, third = parameters
    assert first.grad is None
    assert third.grad is not None
    assert torch.equal(gradient(second), gradient(parameters_of(1, (2,), (2,), (2,))[1]) * 0.5)
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
        assert torch.equal(gradient(parameters[0]), gradient(parameters_of(0, (2,))[0]))  # for the next attempt
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
def test_gradients_that_were_sent_early_and_changed_are_sent_again(ctx: ProcessContext) -> None:
    parameters = parameters_of(ctx.rank, (200, 120), (7,))
    met = Meeting(ctx)
    if ctx.rank == 0:  # the other sends everything at the end
        for bucket in met.group.buckets(parameters):
            met.group.send(bucket, "window")
        gradient(parameters[1]).mul_(2)
    met.average(parameters, 1.0, 1.0, (1.0,), "window")
    assert met.group.resent
    everyone = [parameters_of(rank, (200, 120), (7,)) for rank in range(ctx.world.size)]
    gradient(everyone[0][1]).mul_(2)
    for index, parameter in enumerate(parameters):
        wanted = weighted_sum([gradient(one[index]) for one in everyone], [1.0 / ctx.world.size] * ctx.world.size)
        assert torch.equal(gradient(parameter), wanted)
    met.close()


@ranks(2)
def test_gradients_of_a_window_without_an_update_are_not_used(ctx: ProcessContext) -> None:
    earlier, parameters = parameters_of(7, (3, 2)), parameters_of(ctx.rank, (3, 2))
    met = Meeting(ctx)
    parameters[0].grad, current = earlier[0].grad, parameters[0].grad
    for bucket in met.group.buckets(parameters):
        met.group.send(bucket, "abandoned")
    parameters[0].grad = current
    met.average(parameters, 1.0, 1.0, (1.0,), "window")
    wanted = weighted_sum([gradient(parameters_of(rank, (3, 2))[0]) for rank in range(2)], [0.5, 0.5])
    assert torch.equal(gradient(parameters[0]), wanted)
    met.close()


@ranks(2)
def test_backward_sends_buckets_and_the_mean_is_the_same(ctx: ProcessContext) -> None:
    torch.manual_seed(ctx.rank)
    model = torch.nn.Linear(4, 3)
    parameters = list(model.parameters())
    met = Meeting(ctx)
    windows = ["first"]
    sender = EarlySender(lambda: met.group, lambda: windows[-1], lambda: len(windows) > 1)
    sender.watch(met.group, parameters)
    model(torch.ones(2, 4)).sum().backward()
    (bucket,) = met.group.buckets(parameters)
    assert not is_sent(bucket)  # not the last micro-batch of its window
    windows.append("second")
    model(torch.ones(2, 4)).sum().backward()
    assert is_sent(bucket)
    own = [gradient(parameter).clone() for parameter in parameters]
    met.average(parameters, 1.0, 1.0, (1.0,), windows[-1])
    for parameter, mine in zip(parameters, own, strict=True):
        assert torch.equal(gradient(parameter), mine)  # all ranks have the same ones
    assert not met.group.resent
    sender.close()
    met.close()


@ranks(2, 3)
def test_all_replicas_learn_that_one_wants_to_ask_for_the_members(ctx: ProcessContext) -> None:
    met = Meeting(ctx)
    last = ctx.world.size - 1
    for wishes in [(), (0,), (last,)]:
        parameters = parameters_of(ctx.rank, (2,))
        assert met.average(parameters, 1.0, 1.0, (1.0,), asks=ctx.rank in wishes) == bool(wishes)
    met.close()


@ranks(2)
def test_a_silent_replica_is_given_up_after_the_time_of_the_attempt(ctx: ProcessContext) -> None:
    met = Meeting(ctx)
    if ctx.rank == 0:
        met.group.timeout_s = 0.1  # the group itself waits 5 s
        with pytest.raises(LostReplicaError, match=r"(?i)time"):
            met.average(parameters_of(0, (2,)), 1.0, 1.0, (1.0,))
    ctx.world.barrier("the wait is over")
    met.close()
