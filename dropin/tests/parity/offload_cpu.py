"""A model under cpu_offload gives the same outputs."""

import torch
from torch import nn

from accelerate import cpu_offload


def outputs(model):
    return model(torch.linspace(-1, 1, 6).view(2, 3)).detach()


def run() -> object:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 5)).eval()
    expected = outputs(model)
    cpu_offload(model, execution_device=torch.device("cpu"))
    return [outputs(model).tolist(), bool(torch.allclose(outputs(model), expected))]


PROCESSES = (1,)
