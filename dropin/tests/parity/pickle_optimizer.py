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
    again = pickle.loads(pickle.dumps(optimizer))
    return [
        type(again).__name__,
        again.param_groups[0]["lr"],
        again.defaults["betas"],
        again.step_was_skipped,
    ]


PROCESSES = (1, 2)
