"""A model under disk_offload gives the same outputs."""

import tempfile

import torch
from torch import nn

from accelerate import disk_offload


def outputs(model):
    return model(torch.linspace(-1, 1, 6).view(2, 3)).detach()


def run() -> object:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 5)).eval()
    expected = outputs(model)
    with tempfile.TemporaryDirectory() as folder:
        disk_offload(model, folder, execution_device=torch.device("cpu"))
        return [outputs(model).tolist(), bool(torch.allclose(outputs(model), expected))]


PROCESSES = (1,)
