"""Tests of libraries write `_is_overflow`; schedulers then wait."""

import torch
from torch import nn

from accelerate import Accelerator


def run() -> object:
    accelerator = Accelerator(cpu=True)
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    observations = [optimizer._is_overflow]
    optimizer.step()
    optimizer._is_overflow = True
    scheduler.step()
    observations += [
        optimizer.step_was_skipped,
        accelerator.optimizer_step_was_skipped,
        scheduler.get_last_lr(),
    ]
    optimizer._is_overflow = False
    scheduler.step()
    return [*observations, scheduler.get_last_lr()]


PROCESSES = (1, 2)
