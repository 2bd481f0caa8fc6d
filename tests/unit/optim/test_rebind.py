"""Optimizers written down by name and bound to other parameters go on as if nothing had happened."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from hasten.errors import PrepareError
from hasten.optim.rebind import OptimizerRecord


class Tied(nn.Module):
    """Two names for one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = nn.Linear(4, 4)
        self.embedding = nn.Linear(4, 4, bias=False)
        self.head = nn.Linear(4, 4)
        self.head.weight = self.embedding.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(torch.tanh(self.inside(self.embedding(x))))
        return out


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    generator = torch.Generator().manual_seed(3)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(8, 4, generator=generator)).pow(2).mean().backward()
        optimizer.step()


def in_groups(model: nn.Module) -> list[dict[str, Any]]:
    biases = [p for n, p in model.named_parameters() if "bias" in n]
    return [
        {"params": biases, "lr": 0.1},
        {"params": [p for n, p in model.named_parameters() if "bias" not in n]},
    ]


MAKERS: list[Callable[[nn.Module], torch.optim.Optimizer]] = [
    lambda m: torch.optim.AdamW(m.parameters(), lr=0.01),
    lambda m: torch.optim.SGD(m.parameters(), lr=0.01, momentum=0.9),
    lambda m: torch.optim.Adam(in_groups(m), lr=0.01, amsgrad=True),
    lambda m: torch.optim.Adafactor(m.parameters(), lr=0.01),
]


@pytest.mark.parametrize("index", range(len(MAKERS)))
@pytest.mark.parametrize("steps_before", [0, 3])
def test_a_bound_optimizer_goes_on(index: int, steps_before: int) -> None:
    torch.manual_seed(0)
    model = Tied()
    optimizer = MAKERS[index](model)
    train(model, optimizer, steps_before)
    reference = copy.deepcopy((model, optimizer))
    record = OptimizerRecord.write(optimizer, [model])
    fresh = copy.deepcopy(model)
    record.bind(optimizer, [fresh])
    fresh_ids = {id(p) for p in fresh.parameters()}
    assert all(
        id(p) in fresh_ids for group in optimizer.param_groups for p in group["params"]
    )
    assert all(id(p) in fresh_ids for p in optimizer.state)
    train(fresh, optimizer, 3)
    train(*reference, 3)
    for a, b in zip(fresh.parameters(), reference[0].parameters(), strict=True):
        assert torch.equal(a, b)


def test_one_optimizer_over_two_models_and_compiled_names() -> None:
    models: list[nn.Module] = [nn.Linear(2, 2), nn.Linear(2, 3)]
    optimizer = torch.optim.SGD(
        [p for model in models for p in model.parameters()], lr=0.1
    )
    record = OptimizerRecord.write(optimizer, models)
    assert record.groups == (("0.weight", "0.bias", "1.weight", "1.bias"),)
    wrapped: Any = torch.compile(copy.deepcopy(models[0]), backend="eager")
    record.bind(optimizer, [wrapped, models[1]])
    assert optimizer.param_groups[0]["params"][0] is wrapped._orig_mod.weight


def test_lbfgs_keeps_its_second_list_in_step() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.LBFGS(model.parameters())
    record = OptimizerRecord.write(optimizer, [model])
    fresh = nn.Linear(2, 2)
    record.bind(optimizer, [fresh])
    assert optimizer._params[0] is fresh.weight


def test_parameters_of_strangers_are_named() -> None:
    model, stranger = nn.Linear(2, 2), nn.Linear(3, 5)
    optimizer = torch.optim.SGD(
        [*model.named_parameters(), ("other.weight", stranger.weight)], lr=0.1
    )
    with pytest.raises(
        PrepareError, match=r"'other.weight' \(group 0, parameter 2, shape \(5, 3\)\)"
    ):
        OptimizerRecord.write(optimizer, [model])
    nameless = torch.optim.SGD(stranger.parameters(), lr=0.1)
    with pytest.raises(
        PrepareError,
        match=r"group 0, parameter 0, shape \(5, 3\).*Pass their model to prepare",
    ):
        OptimizerRecord.write(nameless, [model])


def test_a_parameter_that_is_gone_is_named() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    record = OptimizerRecord.write(optimizer, [model])
    with pytest.raises(
        PrepareError, match=r"'0.bias', which the prepared model no longer has"
    ):
        record.bind(optimizer, [nn.Linear(2, 2, bias=False)])
