"""capture_step() where no graph is captured, and what replays tell the parts of a run; on a GPU: tests/device."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hasten import Accelerator
from hasten.accelerator.components import components
from hasten.errors import ArgumentError
from hasten.extensions.capture import captured_step
from hasten.extensions.capture.captured_step import CapturedStep
from hasten.optim.run_part import RunPart


def train(performance: Any, captured: bool) -> list[float]:
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

    run = accelerator.capture_step(step) if captured else step
    losses = []
    for number in range(8):
        generator = torch.Generator().manual_seed(number)
        inputs = torch.randn(4, 8, generator=generator)
        losses.append(run(inputs, torch.randint(4, (4,), generator=generator)).item())
    return losses


def test_losses_are_the_same_with_and_without_it() -> None:
    plain_losses = train("off", False)
    assert train("auto", True) == plain_losses
    assert train("off", True) == plain_losses


def test_on_a_cpu_it_says_why_the_step_is_not_captured(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.INFO, "hasten"):
        train("auto", True)
    messages = [record.getMessage() for record in caplog.records]
    assert (
        len(
            [
                text
                for text in messages
                if "step() runs as it is" in text and "CUDA device" in text
            ]
        )
        == 1
    )


def test_a_captured_step_keeps_its_name_and_returns_no_gradients() -> None:
    accelerator = Accelerator(performance="auto", cpu=True)

    @accelerator.capture_step
    def whole(x: Tensor) -> dict[str, Tensor]:
        """What it does."""
        return {"loss": x.sum()}

    assert (whole.__name__, whole.__doc__) == ("whole", "What it does.")
    assert not whole(torch.ones(2, requires_grad=True))["loss"].requires_grad
    with pytest.raises(ArgumentError, match="capture_step"):
        accelerator.capture_step(3)  # type: ignore[arg-type]


class HostGraph:
    """A graph on the host: the capture runs the step once, a replay only overwrites the tensors of the capture."""

    def __init__(self, function: Callable[..., Any], inputs: Any, *_: object) -> None:
        self.stale = False
        self._static = function(*inputs)

    def replay_step(self, inputs: Any) -> Any:
        """Write the values of other inputs, as the kernels of a graph do."""
        ((x,), _) = inputs
        for tensor, value in zip(self._static, (x.sum(), x.max()), strict=True):
            tensor.data.copy_(value)
        return tuple(tensor.detach().clone() for tensor in self._static)


class Watch(RunPart):
    """Every loss and gradient norm that a part of a run is given."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.norms: list[float] = []

    def loss(self, loss: Tensor, weight: float | Tensor | None) -> None:
        self.losses.append(loss.item())

    def clipped(self, norm: Tensor) -> None:
        self.norms.append(norm.item())


def test_replays_give_their_loss_and_norm_to_the_parts_of_a_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(captured_step, "StepGraph", HostGraph)
    accelerator = Accelerator(cpu=True, trust="off")
    net = nn.Linear(2, 2)
    model, optimizer = accelerator.prepare(
        net, torch.optim.SGD(net.parameters(), lr=0.1)
    )
    run, watch = components(accelerator), Watch()
    run.clock.parts.add(watch)

    def step(x: Tensor) -> tuple[Tensor, Tensor | None]:
        loss = x.sum() + sum((p * 0).sum() for p in model.parameters())
        accelerator.backward(loss)
        norm = accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss, norm

    graph = CapturedStep(step, run.prepared, run.clock, "")
    graph._stream = object()  # type: ignore[assignment]  # no stream on the host
    x = torch.ones(2)
    graph._seen[graph._make_key(((x,), {}))] = 3  # the plain calls before a capture
    graph(x)  # captures and replays
    graph(torch.tensor([2.0, 3.0]))
    assert (watch.losses, watch.norms) == ([2.0, 5.0], [1.0, 3.0])
    assert optimizer.num_updates == 2
