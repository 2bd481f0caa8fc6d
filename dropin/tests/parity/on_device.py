"""Modules built in init_on_device lie there."""

import torch
from torch import nn

from accelerate import init_on_device


def run() -> object:
    with init_on_device(device=torch.device("meta")):
        model = nn.Linear(2, 2)
    return [str(model.weight.device), str(nn.Linear(2, 2).weight.device)]


PROCESSES = (1,)
