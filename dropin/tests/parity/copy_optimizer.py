"""A deep copy of a prepared optimizer has the state of its steps."""

import copy

import torch
from torch import nn

from accelerate import Accelerator


def run() -> object:
    accelerator = Accelerator(cpu=True)
    model = nn.Linear(2, 1)
    model, optimizer = accelerator.prepare(
        model, torch.optim.Adam(model.parameters(), lr=0.1)
    )
    accelerator.backward(model(torch.ones(1, 2)).sum())
    optimizer.step()
    copied_optimizer = copy.deepcopy(optimizer)
    copied_optimizer.param_groups[0]["lr"] = 1.0
    return [
        type(copied_optimizer).__name__,
        len(copied_optimizer.state),
        optimizer.param_groups[0]["lr"],
    ]


PROCESSES = (1, 2)
