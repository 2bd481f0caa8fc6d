"""Optimizers of other packages under every strategy: equal to plain torch on one process, and exact after a resume."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hasten import Accelerator
from hasten.errors import CheckpointError, StepError
from hasten.runtime.context import ProcessContext
from hasten.testing.pool import ranks

pytestmark = pytest.mark.exhaustive  # packages of their own
STEPS, WIDTH = 4, 64
Make = Callable[[nn.Module], Any]  # Any: optimizers of other packages


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(WIDTH, 2 * WIDTH)
        self.second = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.second(torch.tanh(self.first(x)))
        return output


def schedule_free(net: nn.Module) -> Any:
    optimizer = pytest.importorskip("schedulefree").AdamWScheduleFree(
        net.parameters(), lr=0.01, warmup_steps=2
    )
    optimizer.train()
    return optimizer


def lion(net: nn.Module) -> Any:
    return pytest.importorskip("lion_pytorch").Lion(
        net.parameters(), lr=1e-3, weight_decay=0.1
    )


def per_layer(net: nn.Module) -> Any:
    groups = [
        {"params": layer.parameters(), "lr": 0.01 * 0.5**depth}
        for depth, layer in enumerate(net.children())
    ]
    return torch.optim.AdamW(groups, eps=1e-4)


MAKERS: dict[str, Make] = {
    "schedule-free": schedule_free,
    "lion": lion,
    "per-layer": per_layer,
}


def loss_of(net: nn.Module, step: int, rank: int = 0, size: int = 1) -> Tensor:
    rows = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(step)).chunk(
        size
    )[rank]
    loss: Tensor = (net(rows) - 1).pow(2).mean()
    return loss


def plain(make: Make) -> list[Tensor]:
    net = Net()
    optimizer = make(net)
    for step in range(STEPS):
        torch.autograd.backward(loss_of(net, step))
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.detach() for parameter in net.parameters()]


def prepared(make: Make, strategy: str) -> tuple[Accelerator, nn.Module, Any]:
    accelerator = Accelerator(cpu=True, strategy=strategy)
    net = Net()
    net, optimizer = accelerator.prepare(net, make(net))
    return accelerator, net, optimizer


def train(
    accelerator: Accelerator, net: nn.Module, optimizer: Any, steps: range
) -> list[Tensor]:
    for step in steps:
        accelerator.backward(
            loss_of(net, step, accelerator.process_index, accelerator.num_processes)
        )
        optimizer.step()
        optimizer.zero_grad()
    parameters = accelerator.unwrap_model(net).parameters()
    return [
        (p.full_tensor() if hasattr(p, "full_tensor") else p).detach().clone()
        for p in parameters
    ]


@ranks(1, 2)
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize("name", list(MAKERS))
def test_training_equals_plain_torch_and_resumes_exactly(
    ctx: ProcessContext, tmp_path: Path, name: str, strategy: str
) -> None:
    make = MAKERS[name]
    expected = plain(make)
    accelerator, net, optimizer = prepared(
        make, strategy if ctx.world.size > 1 or strategy == "fsdp" else "none"
    )
    train(accelerator, net, optimizer, range(2))
    accelerator.save_state(tmp_path / "state")
    trained_weights = train(accelerator, net, optimizer, range(2, STEPS))
    for weight, expected_weight in zip(trained_weights, expected, strict=True):
        torch.testing.assert_close(weight, expected_weight, rtol=0, atol=2e-5)
    accelerator, net, optimizer = prepared(
        make, accelerator.strategy if ctx.world.size > 1 else "none"
    )
    accelerator.load_state(tmp_path / "state")
    resumed_weights = train(accelerator, net, optimizer, range(2, STEPS))
    assert all(
        torch.equal(weight, expected_weight)
        for weight, expected_weight in zip(
            resumed_weights, trained_weights, strict=True
        )
    )


def eight_bit(net: nn.Module) -> Any:
    return pytest.importorskip("bitsandbytes").optim.AdamW8bit(
        net.parameters(), lr=0.01, min_8bit_size=1024
    )


def torchao_eight_bit(net: nn.Module) -> Any:
    return pytest.importorskip("torchao.optim").AdamW8bit(net.parameters(), lr=0.01)


@ranks(1, 2, timeout_s=300)
def test_adam_of_bitsandbytes_in_eight_bits(
    ctx: ProcessContext, tmp_path: Path
) -> None:
    expected = plain(eight_bit)
    strategy = "ddp" if ctx.world.size > 1 else "none"
    accelerator, net, optimizer = prepared(eight_bit, strategy)
    train(accelerator, net, optimizer, range(2))
    accelerator.save_state(tmp_path / "state")
    trained_weights = train(accelerator, net, optimizer, range(2, STEPS))
    for weight, expected_weight in zip(trained_weights, expected, strict=True):
        # a gradient that rounds otherwise may fall on the next of 256 values
        torch.testing.assert_close(
            weight, expected_weight, rtol=0, atol=2e-3 if ctx.world.size > 1 else 0.0
        )
    accelerator, net, optimizer = prepared(eight_bit, strategy)
    accelerator.load_state(tmp_path / "state")
    resumed_weights = train(accelerator, net, optimizer, range(2, STEPS))
    assert all(
        torch.equal(weight, expected_weight)
        for weight, expected_weight in zip(
            resumed_weights, trained_weights, strict=True
        )
    )
    if ctx.world.size > 1:
        accelerator, net, optimizer = prepared(eight_bit, "fsdp")
        accelerator.backward(loss_of(net, 0))
        with pytest.raises(
            StepError,
            match=r"AdamW8bit cannot update sharded parameters.*strategy='ddp'",
        ):
            optimizer.step()


@ranks(1, 2, timeout_s=300)
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.filterwarnings("ignore")  # of torchao's import
def test_adam_of_torchao_in_eight_bits(
    ctx: ProcessContext, tmp_path: Path, strategy: str
) -> None:
    """Training equals one process; a resume is exact, and the state moves between shards and a whole."""
    used_strategy = strategy if ctx.world.size > 1 or strategy == "fsdp" else "none"
    with torch.compiler.set_stance("force_eager"):
        expected = plain(torchao_eight_bit)
        accelerator, net, optimizer = prepared(torchao_eight_bit, used_strategy)
        train(accelerator, net, optimizer, range(2))
        accelerator.save_state(tmp_path / "state")
        trained_weights = train(accelerator, net, optimizer, range(2, STEPS))
        for weight, expected_weight in zip(trained_weights, expected, strict=True):
            torch.testing.assert_close(weight, expected_weight, rtol=0, atol=2e-3)
        accelerator, net, optimizer = prepared(torchao_eight_bit, used_strategy)
        accelerator.load_state(tmp_path / "state")
        resumed_weights = train(accelerator, net, optimizer, range(2, STEPS))
        assert all(
            torch.equal(weight, expected_weight)
            for weight, expected_weight in zip(
                resumed_weights, trained_weights, strict=True
            )
        )
        other_strategy = (
            "fsdp"
            if used_strategy != "fsdp"
            else "ddp"
            if ctx.world.size > 1
            else "none"
        )
        accelerator, net, optimizer = prepared(torchao_eight_bit, other_strategy)
        accelerator.load_state(tmp_path / "state")
        moved = train(accelerator, net, optimizer, range(2, STEPS))
        for weight, expected_weight in zip(moved, trained_weights, strict=True):
            torch.testing.assert_close(weight, expected_weight, rtol=0, atol=2e-3)


@ranks(1)
@pytest.mark.filterwarnings("ignore")  # of torchao's import
def test_four_bit_state_of_torchao_is_refused_in_one_sentence(
    ctx: ProcessContext, tmp_path: Path
) -> None:
    with torch.compiler.set_stance("force_eager"):
        accelerator, net, optimizer = prepared(
            lambda net: pytest.importorskip("torchao.optim").AdamW4bit(
                net.parameters(), lr=0.01
            ),
            "none",
        )
        train(accelerator, net, optimizer, range(1))
        with pytest.raises(
            CheckpointError, match=r"OptimState4bit.*would lose it; use an optimizer"
        ):
            accelerator.save_state(tmp_path / "state")
