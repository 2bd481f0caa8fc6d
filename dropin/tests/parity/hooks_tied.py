"""Copies of tied weights, which are given up after a forward."""

import torch
from torch import nn

from accelerate.hooks import attach_align_device_hook


def run() -> object:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight = model[0].weight
    copies: dict[int, dict[torch.device, torch.Tensor]] = {
        model[0].weight.data_ptr(): {}
    }
    attach_align_device_hook(
        model, "cpu", True, model.state_dict(), tied_params_map=copies
    )
    model(torch.ones(1, 3))
    names = [sorted(layer._hf_hook.tied_params_names) for layer in model]
    return [names, [list(device_copies) for device_copies in copies.values()]]


PROCESSES = (1,)
