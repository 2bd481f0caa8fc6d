"""The whole weights of a prepared model."""

import torch
from torch import nn

from accelerate import Accelerator


def run() -> object:
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(nn.Linear(2, 1))
    return {
        name: value.tolist()
        for name, value in accelerator.get_state_dict(model).items()
    }


PROCESSES = (1, 2)
