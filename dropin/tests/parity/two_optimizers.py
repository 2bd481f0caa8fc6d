"""Two models trained in turns, as in a GAN."""

import torch
from torch import nn

from accelerate import Accelerator


def run() -> object:
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True)
    first, second = nn.Linear(2, 2), nn.Linear(2, 1)
    optimizers = [
        torch.optim.SGD(model.parameters(), lr=0.05) for model in (first, second)
    ]
    first, second, *optimizers = accelerator.prepare(first, second, *optimizers)
    losses = []
    for step in range(4):
        x = torch.full((1, 2), 0.5 * (step + 1 + accelerator.process_index))
        loss = second(first(x)).pow(2).mean()
        accelerator.backward(loss)
        optimizers[step % 2].step()
        for optimizer in optimizers:
            optimizer.zero_grad()
        losses.append(accelerator.reduce(loss.detach(), "mean").item())
    return losses


PROCESSES = (1, 2)
