"""AlignDevicesHook brings offloaded weights for the time of a forward."""

import torch
from torch import nn

from accelerate.hooks import (
    AlignDevicesHook,
    add_hook_to_module,
    remove_hook_from_module,
)


def run() -> object:
    torch.manual_seed(0)
    model, x = nn.Linear(2, 2), torch.ones(1, 2)
    first = model(x)
    add_hook_to_module(model, AlignDevicesHook(execution_device="cpu", offload=True))
    inside = [str(model.weight.device), bool(torch.equal(model(x), first))]
    remove_hook_from_module(model)
    return [*inside, str(model.weight.device), model(x).tolist()]


PROCESSES = (1,)
