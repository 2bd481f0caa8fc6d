"""A scheduler prepared without its optimizer steps."""

import torch
from torch import nn

from accelerate import Accelerator


def run() -> object:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = Accelerator(cpu=True).prepare(
        torch.optim.lr_scheduler.StepLR(optimizer, 4, gamma=0.5)
    )
    rates = []
    for _ in range(6):
        optimizer.step()
        scheduler.step()
        rates.append(scheduler.get_last_lr()[0])
    return [type(scheduler).__name__, rates]


PROCESSES = (1, 2)
