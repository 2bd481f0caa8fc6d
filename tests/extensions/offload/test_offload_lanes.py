"""Offload on a device that copies as late as it may: state that is read too soon, or memory that is reused too early, is seen.

The stand-in runs a copy only when somebody waits for its mark, fills freed and new memory with a pattern, and therefore gives other numbers
than plain torch wherever a wait is missing.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hasten.extensions.offload.memory_budget import MemoryBudget
from hasten.extensions.offload.update import StreamedUpdate
from hasten.runtime.streams import HostLanes, Pairs


class Mark:
    """A point in the queue of copies."""

    def __init__(self, point: int) -> None:
        self.point = point


class LateLanes(HostLanes):
    """Lanes whose copies run in order, when a mark is waited for; new memory holds nonsense."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.queued: list[list[tuple[Tensor, Tensor]]] = []
        self.done = 0

    def empty(self, num_bytes: int, outlives_copies: bool = False) -> Tensor:
        return torch.full((num_bytes,), 0x7F, dtype=torch.uint8)

    def fetch(self, pairs: Pairs, *marks: object) -> Mark:
        return self._queue(pairs)

    def store(self, pairs: Pairs) -> Mark:
        return self._queue(pairs)

    def compute_waits(self, mark: object) -> None:
        if isinstance(mark, Mark):
            self._run(mark.point)

    def host_waits(self, mark: object) -> None:
        self.compute_waits(mark)

    def _queue(self, pairs: Pairs) -> Mark:
        self.queued.append(list(pairs))
        return Mark(len(self.queued))

    def _run(self, point: int) -> None:
        """Run the copies that a mark depends on: the ones before it in the queue."""
        while self.done < point:
            for target, source in self.queued[self.done]:
                target.copy_(source)
            self.done += 1


class Memory:
    """Memory of a device, as a test says."""

    def __init__(self, allocated: int, peak: int, room: int = 10**9) -> None:
        self.now, self.most, self.room = allocated, peak, room

    def now_and_most(self) -> tuple[int, int]:
        return self.now, self.most

    def capacity(self) -> int:
        return self.room


def model() -> nn.Module:
    torch.manual_seed(3)
    layers = [nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(10)]
    return nn.Sequential(nn.Linear(4, 32), *layers, nn.Linear(32, 2))


Make = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


def two_groups(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    groups: list[dict[str, Any]] = [
        {"params": parameters[::2]},
        {"params": parameters[1::2], "lr": 1e-3},
    ]
    return torch.optim.AdamW(groups, 1e-2)


def train(
    make: Make, attach: Callable[[torch.optim.Optimizer], object], steps: int = 5
) -> tuple[nn.Module, torch.optim.Optimizer]:
    net = model()
    optimizer = make(list(net.parameters()))
    attach(optimizer)
    drawn = torch.Generator().manual_seed(5)
    for step in range(steps):
        optimizer.zero_grad()
        net(torch.randn(3, 4, generator=drawn)).square().sum().backward()
        if step == 2:
            # a parameter without a gradient keeps its state
            next(net.parameters()).grad = None
        optimizer.step()
    return net, optimizer


def check_equal(
    first: tuple[nn.Module, torch.optim.Optimizer],
    second: tuple[nn.Module, torch.optim.Optimizer],
) -> None:
    for a, b in zip(first[0].parameters(), second[0].parameters(), strict=True):
        assert torch.equal(a, b)
    states = first[1].state_dict()["state"], second[1].state_dict()["state"]
    assert list(states[0]) == list(states[1])
    for index, values in states[0].items():
        assert list(values) == list(states[1][index])
        for key, value in values.items():
            second_value = states[1][index][key]
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(second_value)), (
                index,
                key,
            )


MAKERS: dict[str, Make] = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, 1e-2, foreach=True),
    "adam, amsgrad": lambda parameters: torch.optim.Adam(
        parameters, 1e-2, amsgrad=True
    ),
    "sgd": lambda parameters: torch.optim.SGD(parameters, 1e-2, momentum=0.9),
    "two groups": two_groups,
    "adafactor": lambda parameters: torch.optim.Adafactor(parameters, 1e-2),
}


@pytest.mark.parametrize("name", MAKERS)
def test_an_update_in_pieces_waits_for_every_copy(name: str) -> None:
    lanes = LateLanes()
    plain = train(MAKERS[name], lambda optimizer: None)
    check_equal(
        plain, train(MAKERS[name], lambda optimizer: StreamedUpdate(optimizer, lanes))
    )
    assert lanes.done > 20


def test_pieces_fetched_into_free_memory_give_the_same_numbers() -> None:
    # a large peak was seen first, so that all pieces fit ahead of the update
    use = Memory(0, 10**6)
    held_bytes: list[int] = []

    def attach(optimizer: torch.optim.Optimizer) -> None:
        update = StreamedUpdate(optimizer, LateLanes(), use=use)
        update.drains_in_forward = True
        update.before_block()
        use.most = 0
        optimizer.register_step_pre_hook(
            lambda *_: held_bytes.append(update.held_bytes)
        )

    make = MAKERS["adamw"]
    check_equal(train(make, lambda optimizer: None), train(make, attach))
    assert held_bytes[-1] > 2 * 10 * 32 * 32 * 4  # all of the state


def test_state_is_in_host_memory_between_updates_and_the_device_holds_a_part_at_a_time() -> (
    None
):
    updates: list[StreamedUpdate] = []
    _, optimizer = train(
        MAKERS["adamw"],
        lambda prepared_optimizer: updates.append(
            StreamedUpdate(prepared_optimizer, HostLanes(torch.device("cpu")))
        ),
    )
    total = sum(
        value.numel() * 4
        for values in optimizer.state.values()
        for value in values.values()
        if value.ndim
    )
    assert 0 < updates[0].held_bytes < total / 2
    updates[0].release()
    assert updates[0].held_bytes == 0


def test_a_loaded_state_is_used_by_the_next_update() -> None:
    make = MAKERS["adamw"]
    plain, streamed = (
        train(make, lambda optimizer: None),
        train(make, lambda optimizer: StreamedUpdate(optimizer, LateLanes())),
    )
    saved = train(make, lambda optimizer: None, steps=2)[1].state_dict()
    for net, optimizer in (plain, streamed):
        # on one device, torch would share its memory
        optimizer.load_state_dict(copy.deepcopy(saved))
        optimizer.zero_grad()
        net(torch.ones(1, 4)).sum().backward()
        optimizer.step()
    check_equal(plain, streamed)


def test_a_parameter_added_later_is_updated_too() -> None:
    def trained(
        attach: Callable[[torch.optim.Optimizer], object],
    ) -> tuple[nn.Module, torch.optim.Optimizer]:
        net, optimizer = train(MAKERS["adamw"], attach)
        extra = nn.Linear(2, 2)
        with torch.no_grad():
            for parameter in extra.parameters():
                parameter.fill_(0.5)
        optimizer.add_param_group({"params": list(extra.parameters()), "lr": 0.1})
        for _ in range(2):
            extra(net(torch.ones(1, 4))).sum().backward()
            optimizer.step()
        return nn.Sequential(net, extra), optimizer

    check_equal(
        trained(lambda new_optimizer: None),
        trained(lambda new_optimizer: StreamedUpdate(new_optimizer, LateLanes())),
    )


def test_hooks_of_the_user_run_once_for_an_update_and_see_all_parameters() -> None:
    group_sizes: list[int] = []

    def attach(optimizer: torch.optim.Optimizer) -> None:
        optimizer.register_step_post_hook(
            lambda stepped_optimizer, *_: group_sizes.append(
                len(stepped_optimizer.param_groups[0]["params"])
            )
        )
        StreamedUpdate(optimizer, LateLanes())

    train(MAKERS["adamw"], attach, steps=3)
    assert group_sizes == [24, 24, 24]


def test_the_budget_uses_memory_that_activations_have_left_and_no_more() -> None:
    memory = Memory(100, 120)
    budget = MemoryBudget(10, memory)
    # two blocks begin, two gradients arrive
    step = ((20, True), (110, True), (70, False), (40, False))
    for memory.now, in_forward in step:
        budget.record_use(0, in_forward)
    budget.end_step()
    memory.now = 30
    assert budget.fits_in_update(0, 90)
    assert not budget.fits_in_update(0, 91)
    memory.now = 20
    budget.record_use(0, in_forward=True)
    assert budget.is_tight(11)  # the next block begins with 110 of 120
    assert not budget.is_tight(10)
    memory.now = 110
    budget.record_use(0, in_forward=True)
    assert not budget.is_tight(10)
    memory.now = 70
    budget.record_use(0)
    assert budget.fits_ahead(0, 50)
    assert not budget.fits_ahead(0, 51)
    assert not MemoryBudget(10, None).fits_in_update(8, 3)


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_what_is_held_while_the_loss_is_computed_fits_the_device_beside_the_peak(
    micro_batches: int,
) -> None:
    memory = Memory(0, 120)  # the peak of 120 was the loss, which no sample saw
    budget = MemoryBudget(10, memory)
    forward = [(20, True), (60, True)]
    step = [*forward * micro_batches, (50, False), (40, False)]
    for memory.now, in_forward in step:
        budget.record_use(0, in_forward)
    budget.end_step()
    for number, (memory.now, in_forward) in enumerate(step[: 2 * micro_batches]):
        budget.record_use(0, in_forward)
        if number % 2:  # the loss follows
            for memory.room, tight in (
                (1000, False),
                (160, False),
                (159, True),
                (130, True),
            ):
                assert budget.is_tight(40) == tight
                assert not budget.is_tight(10)
        else:
            memory.room = 130
            assert not budget.is_tight(40)  # nothing but the next block follows
