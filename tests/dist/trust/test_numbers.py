"""A loss or gradient that is not finite is reported with its update, rank, samples and module; skipping is as if it had not been."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from hasten import Accelerator
from hasten.errors import ConfigError, HastenWarning, NumbersError
from hasten.runtime.context import ProcessContext
from hasten.testing.pool import ranks
from hasten.testing.toys import seeded

ROWS, BATCH = 48, 3


class Rows(Dataset[tuple[Tensor, Tensor]]):
    """Rows by index; one of them is bad."""

    def __init__(self, bad: int | None, value: float) -> None:
        g = torch.Generator().manual_seed(1)
        self.x = torch.rand(ROWS, 4, generator=g) + 0.5
        self.y = torch.randn(ROWS, 2, generator=g)
        if bad is not None:
            self.x[bad] = value

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.x[index], self.y[index]


class Log(nn.Module):
    """Not finite at zero: its output is -inf, and the gradient of a square root there is inf."""

    def __init__(self, root: bool) -> None:
        super().__init__()
        self.root = root

    def forward(self, x: Tensor) -> Tensor:
        return x.sqrt() if self.root else x.log()


class Net(nn.Module):
    """Scales its input, takes a logarithm or a root, normalises, and drops some."""

    def __init__(self, root: bool = False, norm: bool = True) -> None:
        super().__init__()
        self.scale = nn.Linear(4, 4, bias=False)
        self.scale.weight.data = torch.eye(4)
        self.log = Log(root)
        self.norm = nn.BatchNorm1d(4) if norm else nn.Identity()
        self.head = nn.Sequential(
            nn.Linear(4, 8), nn.Tanh(), nn.Dropout(0.1), nn.Linear(8, 2)
        )

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.norm(self.log(self.scale(x))))
        return out


def train(
    accelerator: Accelerator,
    bad: int | None,
    value: float = 0.0,
    root: bool = False,
    norm: bool = True,
    first: Callable[[], object] = lambda: None,
) -> tuple[Any, ...]:
    torch.manual_seed(3)
    net = seeded(lambda: Net(root, norm))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    loader = DataLoader(Rows(bad, value), batch_size=BATCH, shuffle=True)
    model, optimizer, scheduler, loader = accelerator.prepare(
        net, optimizer, scheduler, loader
    )
    order: list[list[int]] = []
    first()
    for x, y in loader:
        order.append(loader.samples())
        with accelerator.accumulate(model):
            accelerator.backward(((model(x) - y) ** 2).mean())
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    return net, optimizer, scheduler, order


def where(order: list[list[int]], bad: int) -> int | None:
    return next((number for number, batch in enumerate(order) if bad in batch), None)


@ranks(1, 2)
@pytest.mark.parametrize("value", [0.0, math.nan], ids=["module", "data"])
def test_stop_names_update_rank_samples_and_module(
    ctx: ProcessContext, value: float
) -> None:
    bad = 17
    # the order does not depend on the values
    _, _, _, order = train(Accelerator(trust={"numbers": "off"}), None)
    rank_orders = ctx.world.all_gather_object((where(order, bad), order))
    owner = next(rank for rank, (step, _) in enumerate(rank_orders) if step is not None)
    bad_step, batches = rank_orders[owner]
    with pytest.raises(NumbersError) as caught:
        train(Accelerator(trust={"numbers": "stop"}), bad, value)
    error = caught.value
    assert (error.step, error.samples) == (bad_step + 1, {owner: batches[bad_step]})
    assert error.ranks == (owner,)
    text = str(error)
    expected = (
        "'log' (Log)"
        if value == 0.0
        else "the batch contains nan or inf; 'scale' (Linear)"
    )
    assert f"first module whose output is not finite: {expected}" in text
    assert f"dataset indices {', '.join(map(str, batches[bad_step]))}" in text
    assert len(set(ctx.world.all_gather_object(text))) == 1


@ranks(1, 2)
def test_a_gradient_that_is_not_finite_behind_a_finite_loss(
    ctx: ProcessContext,
) -> None:
    with pytest.raises(NumbersError, match="a gradient is nan or inf") as caught:
        train(Accelerator(trust={"numbers": "stop"}), 17, root=True)
    assert (
        "none: every output was finite, so it was caused by the loss or the backward pass"
        in str(caught.value)
    )
    assert "gradients that are not finite: scale.weight" in str(caught.value)


@ranks(1, 2)
@pytest.mark.parametrize("every", [1, 2])
def test_skip_is_as_if_the_update_had_not_been(ctx: ProcessContext, every: int) -> None:
    """Against a run of the same order in which the loop itself leaves that update out."""
    bad = 17
    accelerator = Accelerator(
        trust={"numbers": "skip"}, gradient_accumulation_steps=every
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        net, optimizer, scheduler, order = train(accelerator, bad, norm=False)
    messages = [
        str(caught_warning.message)
        for caught_warning in caught
        if issubclass(caught_warning.category, HastenWarning)
    ]
    assert len(messages) == (1 if ctx.is_main else 0)
    window = max(
        step // every
        for step in ctx.world.all_gather_object(where(order, bad))
        if step is not None
    )

    plain = Accelerator(trust={"numbers": "off"}, gradient_accumulation_steps=every)
    torch.manual_seed(3)
    reference_model = seeded(lambda: Net(norm=False))
    reference = torch.optim.SGD(reference_model.parameters(), lr=0.01, momentum=0.9)
    rates = torch.optim.lr_scheduler.ExponentialLR(reference, 0.9)
    loader = DataLoader(Rows(bad, 0.0), batch_size=BATCH, shuffle=True)
    model, reference, rates, loader = plain.prepare(
        reference_model, reference, rates, loader
    )
    for number, (x, y) in enumerate(loader):
        with plain.accumulate(model):
            plain.backward(((model(x) - y) ** 2).mean())
            if number // every == window:
                reference.optimizer.zero_grad()
                continue
            reference.step()
            rates.step()
            reference.zero_grad()
    for name, value in net.state_dict().items():
        assert torch.equal(value, reference_model.state_dict()[name]), name
    for parameter, reference_parameter in zip(
        net.parameters(), reference_model.parameters(), strict=True
    ):
        assert torch.equal(
            optimizer.state[parameter]["momentum_buffer"],
            reference.state[reference_parameter]["momentum_buffer"],
        )
    assert scheduler.get_last_lr() == rates.get_last_lr()
    assert optimizer.num_updates == optimizer.num_attempts - 1


@ranks(1, 2)
def test_repeating_a_batch_leaves_no_trace(ctx: ProcessContext) -> None:
    """Buffers and random states are the same with the look as without it: skipped with and without the module's name."""
    states = []
    for looks in (True, False):
        accelerator = Accelerator(trust={"numbers": "skip"})
        if not looks:
            accelerator._clock.parts.prepared = ()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            net, *_ = train(accelerator, 17, root=True)
        assert any(
            "whose output" in str(caught_warning.message) for caught_warning in caught
        ) is (looks and ctx.is_main)
        states.append(
            (
                {name: value.clone() for name, value in net.state_dict().items()},
                torch.get_rng_state(),
            )
        )
    (first, first_rng), (second, second_rng) = states
    assert torch.equal(first_rng, second_rng)
    assert all(torch.equal(first[name], second[name]) for name in first)


@ranks(1, 2)
def test_by_default_it_is_reported_once_and_training_goes_on(
    ctx: ProcessContext,
) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        _, optimizer, _, order = train(Accelerator(), 17)
    messages = [
        str(caught_warning.message)
        for caught_warning in caught
        if issubclass(caught_warning.category, HastenWarning)
    ]
    assert len(messages) == 1
    assert f"on rank {ctx.rank}" in messages[0]
    assert "numbers=stop" in messages[0]
    bad_step = where(order, 17)
    if bad_step is not None:
        assert f"in update {bad_step + 1} " in messages[0]
        assert f"dataset indices {', '.join(map(str, order[bad_step]))}" in messages[0]
    assert optimizer.num_updates == len(order)


@ranks(1, 2)
def test_a_spike_is_what_exceeds_the_running_median(ctx: ProcessContext) -> None:
    accelerator = Accelerator(trust={"numbers": "stop", "numbers_spike": 20})
    model = nn.Linear(1, 1)
    model, optimizer = accelerator.prepare(
        model, torch.optim.SGD(model.parameters(), lr=0.0)
    )

    def step(value: float) -> None:
        accelerator.backward((model(torch.ones(2, 1)) * 0).sum() + value)
        optimizer.step()
        optimizer.zero_grad()

    step(100.0)  # nothing to compare with yet
    for number in range(30):
        step(1.0 + number % 3)
    step(39.0)
    with pytest.raises(
        NumbersError, match=r"the loss is 41, 20.5 times the median of the last"
    ):
        step(41.0 if ctx.rank == 0 else 2.0)


@ranks(1, 2)
def test_overflow_under_fp16_is_the_scalers_business(ctx: ProcessContext) -> None:
    """The scaler's own skips are no alarm; a loss that is not finite is, and the scaler skips it."""
    for numbers in ("stop", "skip"):
        accelerator = Accelerator(trust={"numbers": numbers}, mixed_precision="fp16")
        model = seeded(lambda: nn.Linear(4, 4))
        model, optimizer = accelerator.prepare(
            model, torch.optim.SGD(model.parameters(), lr=0.1)
        )
        skipped = 0
        for _ in range(6):
            # overflows at the first scales
            accelerator.backward(model(torch.ones(2, 4)).float().sum())
            optimizer.step()
            skipped += accelerator.optimizer_step_was_skipped
            optimizer.zero_grad()
        assert 0 < skipped < 6
        accelerator.backward(model(torch.ones(2, 4)).float().sum() * math.nan)
        if numbers == "stop":
            with pytest.raises(NumbersError, match="the loss is nan in update 7"):
                optimizer.step()
        else:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                optimizer.step()
            assert (
                any(
                    "the scaler skips the update" in str(caught_warning.message)
                    for caught_warning in caught
                )
                is ctx.is_main
            )
            assert accelerator.optimizer_step_was_skipped


@ranks(2)
def test_shards_are_gathered_for_the_look(ctx: ProcessContext) -> None:
    with pytest.raises(
        NumbersError, match=r"first module whose output is not finite: 'log' \(Log\)"
    ):
        train(Accelerator(trust={"numbers": "stop"}, strategy="fsdp"), 17)


def test_what_cannot_be_honoured_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"numbers_spike=3 has no effect with trust.numbers=off"
    ):
        Accelerator(trust={"numbers": "off", "numbers_spike": 3})
    with pytest.raises(ConfigError, match="under mixed_precision='fp16'"):
        Accelerator(
            trust={"numbers": "skip", "numbers_spike": 3},
            mixed_precision="fp16",
            cpu=True,
        )
