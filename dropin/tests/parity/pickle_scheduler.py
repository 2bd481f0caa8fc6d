"""A prepared scheduler that went through pickle knows its rate."""

import pickle

import torch
from torch import nn

from accelerate import Accelerator


def run() -> object:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    prepared = Accelerator(cpu=True).prepare(
        model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1)
    )
    restored_scheduler = pickle.loads(pickle.dumps(prepared[2]))
    return [
        type(restored_scheduler).__name__,
        restored_scheduler.get_last_lr(),
        len(restored_scheduler.optimizers),
    ]


PROCESSES = (1, 2)
