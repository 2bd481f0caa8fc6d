"""Parts of a run: which events they get, in which order, and that an event without a part has no listener."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from hasten import Accelerator
from hasten.errors import StepError
from hasten.optim.loader_progress import LoaderCursor
from hasten.optim.run_part import (
    EVENTS,
    RunPart,
    RunParts,
    in_every_run,
    parts_of_every_run,
)
from hasten.optim.window import Holder


class Recorder(RunPart):
    """Records the events of a loop."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.skips = False

    def settings(self, settings: Mapping[str, Any]) -> Mapping[str, Any]:
        return {**settings, "gradient_accumulation_steps": 2}

    def built(self, run: Any) -> None:
        self.events.append("built")

    def pass_begins(self, cursor: LoaderCursor) -> None:
        self.events.append("pass_begins")

    def batch_ready(self, cursor: LoaderCursor) -> None:
        self.events.append("batch_ready")

    def batch(self, cursor: LoaderCursor) -> None:
        self.events.append("batch")

    def pass_ends(self, cursor: LoaderCursor) -> None:
        self.events.append("pass_ends")

    def backward(self) -> None:
        self.events.append("backward")

    def loss(self, loss: Tensor, weight: float | Tensor | None) -> None:
        self.events.append("loss")

    def backward_done(self) -> None:
        self.events.append("backward_done")

    def gradients(self, optimizer: Holder) -> bool:
        self.events.append("gradients")
        return self.skips

    def before_update(self, optimizer: Holder) -> bool:
        self.events.append("before_update")
        return False

    def after_update(self, optimizer: Holder, applied: bool) -> None:
        self.events.append("applied" if applied else "skipped")

    def end(self) -> None:
        self.events.append("end")


class Doubler(RunPart):
    """Doubles logged values, and gives a status."""

    def log(self, values: Mapping[str, Any]) -> Mapping[str, Any]:
        return {name: value * 2 for name, value in values.items()}

    def status(self) -> Mapping[str, float | str]:
        return {"doubled": 2.0, "by": "two"}


def test_an_event_has_the_parts_that_need_it_in_their_order() -> None:
    run_parts, first, second = RunParts(), Recorder(), Recorder()
    assert all(getattr(run_parts, event) == () for event in EVENTS)
    second.unused_events = ("loss",)
    for run_part in (first, second, doubler := Doubler()):
        run_parts.add(run_part)
    assert run_parts.loss == (first.loss,)
    assert list(run_parts.end) == [first.end, second.end]
    assert run_parts.read_status() == {"doubled": 2.0, "by": "two"}
    assert run_parts.read_numbers() == {"doubled": 2.0}
    assert "Doubler: log, status" in str(run_parts)
    run_parts.forget(first, "end")
    assert list(run_parts.end) == [second.end]
    run_parts.remove(doubler)
    assert run_parts.log == ()
    assert run_parts.names("gradients") == "Recorder, Recorder"


def test_a_loop_calls_its_parts_in_order() -> None:
    recorder = Recorder()
    with in_every_run(recorder):
        accelerator = Accelerator(cpu=True)
    assert not parts_of_every_run()
    assert accelerator.gradient_accumulation_steps == 2, "settings() of the part"
    model: Any = nn.Linear(1, 1)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    loader: Any = DataLoader(TensorDataset(torch.ones(2, 1)), batch_size=1)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for (x,) in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(x).sum())
            optimizer.step()
    accelerator.end_training()
    step = ["batch_ready", "backward", "loss", "backward_done"]
    update = ["gradients", "before_update", "applied"]
    assert recorder.events == [
        "built",
        "pass_begins",
        *step,
        "batch",
        *step,
        *update,
        "batch",
        "pass_ends",
        "end",
    ]


def test_a_part_that_changes_gradients_may_skip_the_update() -> None:
    accelerator = Accelerator(cpu=True)
    recorder = Recorder()
    recorder.skips = True
    accelerator._clock.parts.add(recorder)
    model: Any = nn.Linear(1, 1)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    initial_weight = model.weight.detach().clone()
    accelerator.backward(model(torch.ones(1, 1)).sum())
    optimizer.step()
    assert torch.equal(model.weight, initial_weight)
    assert recorder.events[-2:] == ["gradients", "skipped"]
    with pytest.raises(StepError, match="Recorder cannot change them"):
        optimizer.step(lambda: torch.zeros(()))
