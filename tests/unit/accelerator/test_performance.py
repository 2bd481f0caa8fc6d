"""performance="auto" makes choices where they apply, says why it does not elsewhere, and trains to the same losses."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hasten.accelerator import preparing
from hasten.accelerator.facade import Accelerator
from hasten.config.base import given
from hasten.config.resolve import resolve
from hasten.config.sections.loop import PerformanceSettings
from hasten.errors import ConfigError
from hasten.strategies.choose import chooses_speed


@pytest.mark.parametrize(
    ("value", "active"),
    [
        (None, False),
        ("off", False),
        ("auto", True),
        ({"fused": False}, True),
        ({"mode": "off", "fused": False}, False),
        (PerformanceSettings(step_graph=False), True),
        (PerformanceSettings(mode="off"), False),
    ],
)
def test_one_word_a_mapping_or_the_class_turn_it_on(value: Any, active: bool) -> None:
    performance_settings = resolve(code={"performance": value}).config.performance
    assert chooses_speed(performance_settings) is active
    if isinstance(value, PerformanceSettings):
        assert given(performance_settings) == given(value)


def test_a_wrong_name_or_word_is_refused_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"did you mean 'performance\.fused'"):
        Accelerator(performance={"fusd": False}, cpu=True)
    with pytest.raises(ConfigError, match="auto"):
        Accelerator(performance="atuo", cpu=True)


def train(performance: Any) -> list[float]:
    torch.manual_seed(0)
    accelerator = Accelerator(performance=performance, cpu=True)
    net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    model, optimizer = accelerator.prepare(
        net, torch.optim.AdamW(net.parameters(), lr=1e-2)
    )

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(model(x), y)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    losses = []
    for number in range(8):
        generator = torch.Generator().manual_seed(number)
        losses.append(
            step(
                torch.randn(4, 8, generator=generator),
                torch.randint(4, (4,), generator=generator),
            ).item()
        )
    return losses


def test_losses_are_the_same_with_and_without_it() -> None:
    assert train("auto") == train("off")  # nothing acts on a CPU in so few steps


def test_on_a_cpu_every_choice_says_why_it_is_not_made(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.INFO, "hasten"):
        train("auto")
    log_messages = [record.getMessage() for record in caplog.records]
    assert (
        len(
            [
                text
                for text in log_messages
                if "AdamW stays as it is" in text and "cpu" in text
            ]
        )
        == 1
    )


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"fused": False}, "fused=False"),
        ({"foreach": True}, "foreach=True"),
        ({}, "on cpu"),
    ],
)
def test_what_was_asked_of_an_optimizer_stays(
    options: dict[str, Any], why: str
) -> None:
    net = nn.Linear(2, 2)
    assert why in preparing.fused_refusal(
        torch.optim.AdamW(net.parameters(), **options)
    )
    assert "no fused Rprop" in preparing.fused_refusal(
        torch.optim.Rprop(net.parameters())
    )
    assert not preparing.fused_refusal(torch.optim.AdamW(net.parameters(), fused=True))
