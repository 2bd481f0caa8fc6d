"""Gradients are the mean over processes, except under no_sync."""

import torch
from torch import nn

from accelerate import Accelerator


def run() -> object:
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True)
    model = nn.Linear(2, 1)
    model, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    x = torch.full((1, 2), 1.0 + accelerator.process_index)
    accelerator.backward(model(x).sum())
    inner = accelerator.unwrap_model(model)
    synced = accelerator.gather(inner.weight.grad.clone()).tolist()
    inner.weight.grad = inner.bias.grad = None
    with accelerator.no_sync(model):
        accelerator.backward(model(x).sum())
    return [synced, accelerator.gather(inner.weight.grad).tolist()]


PROCESSES = (1, 2)
