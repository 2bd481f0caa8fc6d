"""A prepared scheduler's state saved and loaded."""

import torch
from torch import nn

from accelerate import Accelerator


def run() -> object:
    accelerator = Accelerator(cpu=True)
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: 1 / (1 + step)
    )
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    for _ in range(3):
        optimizer.step()
        scheduler.step()
    state = scheduler.state_dict()
    optimizer.step()
    scheduler.step()
    later = scheduler.get_last_lr()
    scheduler.load_state_dict(state)
    return [state["last_epoch"], later, scheduler.get_last_lr(), scheduler.get_lr()]


PROCESSES = (1, 2)
