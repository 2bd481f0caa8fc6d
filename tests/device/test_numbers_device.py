"""The numbers watch on a real accelerator: losses are copied many at a time, and none of them is forgotten."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

from hasten import Accelerator
from hasten.errors import HastenWarning

pytestmark = pytest.mark.device


@pytest.mark.parametrize("bad", [0, 63, 64, 100, 129])
def test_a_bad_loss_is_reported_with_its_update_at_the_latest_when_training_ends(
    bad: int,
) -> None:
    accelerator = Accelerator()
    model = nn.Linear(4, 4)
    model, optimizer = accelerator.prepare(
        model, torch.optim.SGD(model.parameters(), lr=0.0)
    )
    x = torch.ones(2, 4, device=accelerator.device)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(130):
            accelerator.backward(
                model(x).sum() * (float("nan") if step == bad else 1.0)
            )
            optimizer.step()
            optimizer.zero_grad()
        accelerator.end_training()
    messages = [
        str(warning.message)
        for warning in caught
        if issubclass(warning.category, HastenWarning)
    ]
    assert len(messages) == 1
    assert f"the loss is nan in update {bad + 1} on rank 0" in messages[0]
