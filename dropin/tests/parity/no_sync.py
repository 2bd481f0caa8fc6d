"""Gradients under no_sync are this rank's own."""

import torch
from torch import nn

from accelerate import Accelerator
from accelerate.utils import gather_object


def run() -> object:
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(0)
    model = accelerator.prepare(nn.Linear(1, 1, bias=False))
    x = torch.full((1, 1), 1.0 + accelerator.process_index)
    with accelerator.no_sync(model):
        accelerator.backward(model(x).sum())
    local_gradient = accelerator.unwrap_model(model).weight.grad.item()
    accelerator.backward(model(x).sum())
    return gather_object(
        [[local_gradient, accelerator.unwrap_model(model).weight.grad.item()]]
    )


PROCESSES = (1, 2)
