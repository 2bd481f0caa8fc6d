"""A scheduler that looks at a metric."""

import torch
from torch import nn

from accelerate import Accelerator


def run() -> object:
    accelerator = Accelerator(cpu=True)
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(
        optimizer, patience=1, factor=0.5
    )
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    rates = []
    for metric in (1.0, 1.0, 1.0, 1.0, 0.5):
        optimizer.step()
        scheduler.step(metric)
        rates.append(optimizer.param_groups[0]["lr"])
    return rates


PROCESSES = (1, 2)
