"""A deep copy of a prepared model computes in the same precision, and gives float32."""

import copy

import torch
from torch import nn

from accelerate import Accelerator


def run() -> object:
    model = Accelerator(cpu=True, mixed_precision="bf16").prepare(nn.Linear(2, 1))
    copied_model = copy.deepcopy(model)
    return [
        str(copied_model(torch.ones(1, 2)).dtype),
        bool((copied_model(torch.ones(1, 2)) == model(torch.ones(1, 2))).all()),
    ]


PROCESSES = (1,)
