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
    again = copy.deepcopy(optimizer)
    again.param_groups[0]["lr"] = 1.0
    return [type(again).__name__, len(again.state), optimizer.param_groups[0]["lr"]]


PROCESSES = (1, 2)
