"""An optimizer prepared before its model updates it."""

import torch
from torch import nn

from accelerate import Accelerator


def run() -> object:
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(0)
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = accelerator.prepare(optimizer)
    model = accelerator.prepare(model)
    losses = []
    for step in range(3):
        loss = (
            model(torch.full((1, 2), 1.0 + accelerator.process_index + step))
            .pow(2)
            .sum()
        )
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(accelerator.reduce(loss.detach(), "mean").item())
    return losses


PROCESSES = (1, 2)
