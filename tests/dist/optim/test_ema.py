"""The moving average of weights: equal to plain torch under every strategy, resumed exactly, resharded."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hasten import Accelerator, ParallelismConfig, optimizers
from hasten.errors import ConfigError, HastenError, StepError
from hasten.optim.ema import EMA
from hasten.runtime.context import ProcessContext
from hasten.testing.pool import ranks

STEPS = 9


class Net(nn.Module):
    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(6, 7)
        self.second = nn.Linear(7, 8)
        self.third = nn.Linear(8, 3)
        self.frozen = nn.Linear(3, 3).requires_grad_(False)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.seen += 1.0
        out: Tensor = self.frozen(
            self.third(torch.tanh(self.second(torch.tanh(self.first(x)))))
        )
        return out


def batch(step: int) -> Tensor:
    return torch.randn(12, 6, generator=torch.Generator().manual_seed(step))


def trained(net: nn.Module) -> list[Tensor]:
    return [p for p in net.parameters() if p.requires_grad]


def plain(decay: Callable[[int], float], steps: int = STEPS) -> list[Tensor]:
    """Averages of a plain loop on all samples."""
    net = Net()
    optimizer = torch.optim.AdamW(trained(net), lr=1e-2)
    average = [p.detach().clone() for p in trained(net)]
    for step in range(steps):
        torch.autograd.backward((net(batch(step)) - 1).pow(2).mean())
        optimizer.step()
        optimizer.zero_grad()
        rate = decay(step + 1)
        average = [
            rate * a + (1 - rate) * p.detach()
            for a, p in zip(average, trained(net), strict=True)
        ]
    return average


def fresh(**settings: Any) -> tuple[Accelerator, nn.Module, Any]:
    accelerator = Accelerator(cpu=True, **settings)
    net = Net()
    net, optimizer = accelerator.prepare(net, torch.optim.AdamW(trained(net), lr=1e-2))
    return accelerator, net, optimizer


def train(
    accelerator: Accelerator,
    net: nn.Module,
    optimizer: Any,
    steps: range,
    num_shares: int,
    share_index: int,
) -> None:
    for step in steps:
        accelerator.backward(
            (net(batch(step).chunk(num_shares)[share_index]) - 1).pow(2).mean()
        )
        optimizer.step()
        optimizer.zero_grad()


def whole(tensor: Tensor) -> Tensor:
    return (
        tensor.full_tensor().clone()
        if hasattr(tensor, "full_tensor")
        else tensor.detach().clone()
    )


def swapped(accelerator: Accelerator, ema: EMA, net: nn.Module) -> list[Tensor]:
    with ema.swapped():
        return [whole(p) for p in trained(accelerator.unwrap_model(net))]


def every_second_after_three(num_updates: int) -> float:
    if num_updates <= 3:
        return 0.0
    return 0.8 if (num_updates - 3) % 2 == 0 else 1.0


CASES: dict[str, Callable[[int], float] | float] = {
    "plain": 0.9,
    "every second, after three": every_second_after_three,
    "a function": lambda num_updates: min(0.99, (1 + num_updates) / (10 + num_updates)),
}
SETTINGS: dict[str, dict[str, Any]] = {
    "ddp": {"strategy": "ddp"},
    "fsdp": {"strategy": "fsdp"},
}


@ranks(1, 2, exhaustive=(4,))
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("strategy", SETTINGS)
def test_the_average_is_that_of_a_plain_loop(
    ctx: ProcessContext, strategy: str, name: str
) -> None:
    decay = CASES[name]
    accelerator, net, optimizer = fresh(
        **(SETTINGS[strategy] if ctx.world.size > 1 else {})
    )
    ema = accelerator.ema(net, decay)
    train(accelerator, net, optimizer, range(STEPS), ctx.world.size, ctx.rank)
    weights = [whole(p) for p in accelerator.unwrap_model(net).parameters()]
    expected = plain(decay if callable(decay) else lambda _: decay)
    for averaged, expected_average in zip(
        swapped(accelerator, ema, net), expected, strict=True
    ):
        torch.testing.assert_close(averaged, expected_average, rtol=0, atol=2e-6)
    restored = [whole(p) for p in accelerator.unwrap_model(net).parameters()]
    assert all(torch.equal(a, b) for a, b in zip(weights, restored, strict=True))
    if strategy == "fsdp" and ctx.world.size > 1:  # sharded as the weights are
        states = [value["average"] for value in ema.state.state.values()]
        assert any(value.to_local().numel() < value.numel() for value in states)
    assert all(
        value["average"].dtype == torch.float32 for value in ema.state.state.values()
    )


@ranks(2)
def test_under_tensor_parallelism(ctx: ProcessContext) -> None:
    plan = {"first": "colwise", "second": "rowwise"}
    sizes = ParallelismConfig(tp_size=2, tp_plan=plan)
    accelerator = Accelerator(cpu=True, parallelism_config=sizes)
    net = nn.Sequential()
    torch.manual_seed(0)
    net.add_module("first", nn.Linear(6, 8))
    net.add_module("second", nn.Linear(8, 4))
    start = [p.detach().clone() for p in net.parameters()]
    net, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
    ema = accelerator.ema(net, 0.5)
    train(accelerator, net, optimizer, range(1), 1, 0)
    trained = [whole(p) for p in accelerator.unwrap_model(net).parameters()]
    with ema.swapped() as model:
        for a, b, averaged in zip(start, trained, model.parameters(), strict=True):
            torch.testing.assert_close(whole(averaged), (a + b) / 2)


@ranks(2, exhaustive=(4,))
@pytest.mark.parametrize("strategy", SETTINGS)
def test_a_resumed_average_equals_one_that_was_not_stopped(
    ctx: ProcessContext, tmp_path: Path, strategy: str
) -> None:
    where: str = ctx.world.broadcast_object(str(tmp_path))
    share = (ctx.world.size, ctx.rank)
    accelerator, net, optimizer = fresh(**SETTINGS[strategy])
    ema = accelerator.ema(net, every_second_after_three)
    train(accelerator, net, optimizer, range(5), *share)
    accelerator.save_state(f"{where}/middle")
    train(accelerator, net, optimizer, range(5, STEPS), *share)
    uninterrupted = swapped(accelerator, ema, net)
    accelerator, net, optimizer = fresh(**SETTINGS[strategy])
    ema = accelerator.ema(net, every_second_after_three)
    accelerator.load_state(f"{where}/middle")
    assert ema.num_updates == 5
    train(accelerator, net, optimizer, range(5, STEPS), *share)
    assert all(
        torch.equal(a, b)
        for a, b in zip(uninterrupted, swapped(accelerator, ema, net), strict=True)
    )


@ranks(2)
def test_an_average_is_resharded(ctx: ProcessContext, tmp_path: Path) -> None:
    where: str = ctx.world.broadcast_object(str(tmp_path))
    accelerator, net, optimizer = fresh(strategy="fsdp")
    ema = accelerator.ema(net, 0.9)
    train(accelerator, net, optimizer, range(4), 2, ctx.rank)
    averaged = swapped(accelerator, ema, net)
    accelerator.save_state(f"{where}/saved")
    ddp_accelerator, model, _ = fresh(strategy="ddp")
    resharded_ema = ddp_accelerator.ema(model, 0.9)
    ddp_accelerator.load_state(f"{where}/saved")
    assert all(
        torch.equal(a, b)
        for a, b in zip(
            averaged, swapped(ddp_accelerator, resharded_ema, model), strict=True
        )
    )


@ranks(1)
def test_several_optimizers_and_skipped_updates(
    ctx: ProcessContext,
) -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    net = Net()
    net, *prepared_optimizers = accelerator.prepare(
        net, *optimizers(net, lr=0.02, show=False)
    )
    ema = accelerator.ema(net, 0.5)
    for step in range(4):
        with accelerator.accumulate(net):
            accelerator.backward((net(batch(step)) - 1).pow(2).mean())
            for optimizer in prepared_optimizers:
                optimizer.step()
                optimizer.zero_grad()
    assert ema.num_updates == 2  # two windows of two micro-batches
    counted = net.seen.clone()
    with ema.swapped():
        assert torch.equal(net.seen, counted)
    assert torch.equal(net.seen, counted)


@ranks(1)
def test_wrong_use_is_refused(ctx: ProcessContext) -> None:
    accelerator, net, optimizer = fresh()
    with pytest.raises(HastenError, match="has not prepared"):
        accelerator.ema(Net())
    with pytest.raises(ConfigError, match=r"decay=1.0.*outside"):
        accelerator.ema(net, 1.0)
    without_optimizer = Accelerator(cpu=True)
    with pytest.raises(
        ConfigError, match="none of whose parameters is in a prepared optimizer"
    ):
        without_optimizer.ema(without_optimizer.prepare(Net()))
    ema = accelerator.ema(net, 0.9)
    with ema.swapped(), pytest.raises(StepError, match="entered twice"), ema.swapped():
        pass
    with pytest.raises(StepError, match=r"inside `with ema\.swapped"), ema.swapped():
        train(accelerator, net, optimizer, range(1), 1, 0)


@ranks(1, 2)
def test_saves_and_loads_of_swapped_weights_are_refused(
    ctx: ProcessContext, tmp_path: Path
) -> None:
    where: str = ctx.world.broadcast_object(str(tmp_path))
    accelerator, net, optimizer = fresh()
    ema = accelerator.ema(net, 0.5)
    train(accelerator, net, optimizer, range(1), 1, 0)
    accelerator.save_state(f"{where}/trained")
    trained_weights = [whole(p) for p in accelerator.unwrap_model(net).parameters()]
    with ema.swapped():
        with pytest.raises(HastenError, match=r"save_state\(\) was called inside"):
            accelerator.save_state(f"{where}/averaged")
        with pytest.raises(HastenError, match=r"load_state\(\) was called inside"):
            accelerator.load_state(f"{where}/trained")
    final_weights = [whole(p) for p in accelerator.unwrap_model(net).parameters()]
    assert all(
        torch.equal(a, b) for a, b in zip(trained_weights, final_weights, strict=True)
    )
    assert not (Path(where) / "averaged").exists()
