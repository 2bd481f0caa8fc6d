"""Calls in an order or combination that would give wrong numbers are refused, with the remedy."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from hasten import Accelerator
from hasten.errors import PrepareError, StepError


def test_loading_before_preparing_is_refused(tmp_path: Path) -> None:
    first = Accelerator(cpu=True, project_dir=str(tmp_path))
    first.prepare(nn.Linear(1, 1))
    first.save_state()
    second = Accelerator(cpu=True, project_dir=str(tmp_path))
    with pytest.raises(PrepareError, match=r"called before prepare\(\)"):
        second.load_state()
    second.prepare(nn.Linear(1, 1))
    assert second.load_state()


def test_a_plain_optimizer_inside_a_window_is_refused() -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = accelerator.prepare(nn.Linear(1, 1))
    with (
        accelerator.accumulate(model),
        pytest.raises(StepError, match="no optimizer is prepared"),
    ):
        accelerator.backward(model(torch.ones(1, 1)).sum())


@pytest.mark.parametrize("scaled_before", [False, True])
@pytest.mark.parametrize("clips", [False, True])
def test_a_plain_backward_under_fp16_is_refused(
    scaled_before: bool, clips: bool
) -> None:
    accelerator = Accelerator(cpu=True, mixed_precision="fp16")
    net = nn.Linear(1, 1)
    model, optimizer = accelerator.prepare(
        net, torch.optim.SGD(net.parameters(), lr=0.1)
    )
    if scaled_before:
        accelerator.backward(model(torch.ones(1, 1)).sum())
        optimizer.step()
        optimizer.zero_grad()
    model(torch.ones(1, 1)).sum().backward()
    with pytest.raises(StepError, match=r"Call accelerator.backward\(loss\) instead"):
        accelerator.clip_grad_norm_(
            model.parameters(), 1.0
        ) if clips else optimizer.step()


def test_a_save_between_backward_and_step_is_refused(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True)
    net = nn.Linear(1, 1)
    model, optimizer = accelerator.prepare(
        net, torch.optim.SGD(net.parameters(), lr=0.1)
    )
    accelerator.backward(model(torch.ones(1, 1)).sum())
    with pytest.raises(
        StepError, match=r"Call save_state\(\) after optimizer.step\(\)"
    ):
        accelerator.save_state(str(tmp_path / "a"))
    optimizer.step()
    accelerator.save_state(str(tmp_path / "a"))
    accelerator.backward(model(torch.ones(1, 1)).sum())
    optimizer.zero_grad()
    accelerator.save_state(str(tmp_path / "b"))


def test_prepared_objects_are_copied_and_pickled_without_the_parts_of_the_run() -> None:
    accelerator = Accelerator(cpu=True)
    model = nn.Linear(2, 1)
    loader = DataLoader(TensorDataset(torch.arange(4)), batch_size=2)
    model, optimizer, loader = accelerator.prepare(
        model, torch.optim.SGD(model.parameters(), lr=0.1), loader
    )
    assert [batch.tolist() for (batch,) in pickle.loads(pickle.dumps(loader))] == [
        [0, 1],
        [2, 3],
    ]
    for copied in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        copied.param_groups[0]["lr"] = 1.0
        assert optimizer.param_groups[0]["lr"] == 0.1
