"""bf16 training gives float32 losses and weights."""

import torch
from torch import nn

from accelerate import Accelerator


def run() -> object:
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 1))
    model, optimizer = accelerator.prepare(
        model, torch.optim.AdamW(model.parameters(), lr=0.01)
    )
    losses = []
    for step in range(4):
        out = model(torch.linspace(-1, 1, 8).view(2, 4) * (step + 1))
        loss = out.pow(2).mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return [losses, str(out.dtype), str(next(model.parameters()).dtype)]


PROCESSES = (1, 2)
