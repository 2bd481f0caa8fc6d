"""The loss is divided by the window's length in backward."""

import torch
from torch import nn

from accelerate import Accelerator


def run() -> object:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=4)
    weight = nn.Parameter(torch.ones(2))
    accelerator.backward((weight * 8).sum())
    return weight.grad.tolist()


PROCESSES = (1,)
