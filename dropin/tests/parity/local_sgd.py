"""Weights averaged every few updates."""

import torch
from torch import nn

from accelerate import Accelerator
from accelerate.local_sgd import LocalSGD


def run() -> object:
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True)
    model = nn.Linear(2, 1)
    model, optimizer = accelerator.prepare(
        model, torch.optim.SGD(model.parameters(), lr=0.05)
    )
    with LocalSGD(
        accelerator=accelerator, model=model, local_sgd_steps=2, enabled=True
    ) as local:
        for step in range(5):
            x = torch.full((1, 2), 1.0 + accelerator.process_index + step)
            accelerator.backward(model(x).pow(2).mean())
            optimizer.step()
            optimizer.zero_grad()
            local.step()
    weights = accelerator.unwrap_model(model).weight.detach()
    return [accelerator.gather(weights).tolist()]


PROCESSES = (1, 2)
