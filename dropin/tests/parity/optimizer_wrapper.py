"""The prepared optimizer is a real one and shows the inner one's groups."""

import torch
from torch import nn

from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.scheduler import AcceleratedScheduler


def run() -> object:
    accelerator = Accelerator(cpu=True)
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    optimizer.param_groups[0]["lr"] = 0.2
    return [
        isinstance(optimizer, AcceleratedOptimizer),
        isinstance(optimizer, torch.optim.Optimizer),
        isinstance(scheduler, AcceleratedScheduler),
        optimizer.optimizer.param_groups[0]["lr"],
        sorted(optimizer.state_dict()),
        optimizer.step_was_skipped,
        accelerator.optimizer_step_was_skipped,
    ]


PROCESSES = (1, 2)
