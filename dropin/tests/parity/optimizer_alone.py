"""An optimizer prepared without its model updates it."""

import torch
from torch import nn

from accelerate import Accelerator


def run() -> object:
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(0)
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = accelerator.prepare(optimizer)
    for _ in range(3):
        loss = model(torch.ones(1, 2)).pow(2).sum()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    return [loss.item(), model.weight.tolist()]


PROCESSES = (1, 2)
