"""A checkpoint loaded into an empty model gives its outputs."""

import tempfile
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn

from accelerate import init_empty_weights, load_checkpoint_and_dispatch


def outputs(model):
    return model(torch.linspace(-1, 1, 6).view(2, 3)).detach()


def run() -> object:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 5)).eval()
    expected = outputs(model)
    with tempfile.TemporaryDirectory() as folder:
        save_file(model.state_dict(), str(Path(folder) / "model.safetensors"))
        with init_empty_weights():
            empty = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 5))
        empty = load_checkpoint_and_dispatch(
            empty, folder, device_map={"": "cpu"}
        ).eval()
        return [outputs(empty).tolist(), bool(torch.allclose(outputs(empty), expected))]


PROCESSES = (1,)
