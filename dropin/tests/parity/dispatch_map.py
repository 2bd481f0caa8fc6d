"""A model spread over CPU and disk by a map gives the same outputs."""

import tempfile

import torch
from torch import nn

from accelerate import dispatch_model


def outputs(model):
    return model(torch.linspace(-1, 1, 6).view(2, 3)).detach()


def run() -> object:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 5)).eval()
    expected = outputs(model)
    with tempfile.TemporaryDirectory() as folder:
        device_map = {"0": "cpu", "1": "cpu", "2": "disk"}
        model = dispatch_model(model, device_map, main_device="cpu", offload_dir=folder)
        return [
            outputs(model).tolist(),
            bool(torch.allclose(outputs(model), expected)),
            model.hf_device_map,
        ]


PROCESSES = (1,)
