"""Setting one tensor of a module on a device."""

import torch
from torch import nn

from accelerate.utils import named_module_tensors, set_module_tensor_to_device


def run() -> object:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 5))
    set_module_tensor_to_device(model, "0.weight", "meta")
    set_module_tensor_to_device(model, "2.bias", "cpu", value=torch.arange(5.0))
    set_module_tensor_to_device(
        model, "1.running_mean", "cpu", value=torch.ones(4), dtype=torch.float16
    )
    errors = []
    for name, value in (("0.nothing", None), ("0.weight", torch.zeros(1))):
        try:
            set_module_tensor_to_device(model, name, "cpu", value=value)
        except ValueError as error:
            errors.append(type(error).__name__)
    names = [
        [name for name, _ in named_module_tensors(model, recurse=deep)]
        for deep in (True, False)
    ]
    return [
        str(model[0].weight.device),
        model[2].bias.tolist(),
        str(model[1].running_mean.dtype),
        errors,
        names,
    ]


PROCESSES = (1,)
