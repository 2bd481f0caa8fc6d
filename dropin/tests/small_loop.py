"""The training loop that parity scripts share: two epochs of a small network, with what each of them adds to it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accelerate import Accelerator

# Any: Accelerator is the original's class or ours, and the original's methods have no types.


def train(
    accelerator: Accelerator, before_step: Callable[[Any], object] = lambda model: None
) -> list[Any]:
    """Losses, learning rates and the sum of the weights; `before_step` is called when gradients are there."""
    torch.manual_seed(1)
    model: Any = nn.Sequential(
        nn.Linear(4, 8), nn.Dropout(0.1), nn.ReLU(), nn.Linear(8, 1)
    )
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.05)
    scheduler: Any = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, 20)
    data = TensorDataset(torch.randn(24, 4), torch.randn(24, 1))
    model, optimizer, loader, scheduler = accelerator.prepare(
        model, optimizer, DataLoader(data, batch_size=2, shuffle=True), scheduler
    )
    losses, rates = [], []
    for _ in range(2):
        for x, y in loader:
            with accelerator.accumulate(model):
                loss = nn.functional.mse_loss(model(x), y)
                accelerator.backward(loss)
                before_step(model)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            losses.append(accelerator.reduce(loss.detach(), "mean").item())
            rates.append(scheduler.get_last_lr()[0])
    weights = sum(
        p.double().abs().sum().item()
        for p in accelerator.unwrap_model(model).parameters()
    )
    return [losses, rates, weights]
