"""Bytes of modules and parameters, also in another dtype."""

import torch
from torch import nn

from accelerate.utils import compute_module_sizes


def run() -> object:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 5))
    return [
        dict(compute_module_sizes(model)),
        dict(compute_module_sizes(model, dtype=torch.float16)),
    ]


PROCESSES = (1,)
