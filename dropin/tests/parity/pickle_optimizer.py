"""A prepared optimizer that went through pickle has its groups."""

import pickle

import torch
from torch import nn

from accelerate import Accelerator


def run() -> object:
    model = nn.Linear(2, 1)
    _, optimizer = Accelerator(cpu=True).prepare(
        model, torch.optim.Adam(model.parameters(), lr=0.1)
    )
    restored_optimizer = pickle.loads(pickle.dumps(optimizer))
    return [
        type(restored_optimizer).__name__,
        restored_optimizer.param_groups[0]["lr"],
        restored_optimizer.defaults["betas"],
        restored_optimizer.step_was_skipped,
    ]


PROCESSES = (1, 2)
