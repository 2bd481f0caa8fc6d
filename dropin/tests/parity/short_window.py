"""The weights after each micro-step of an epoch that ends inside a window."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accelerate import Accelerator


def run() -> object:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=4)
    model = nn.Linear(1, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    rows = TensorDataset(torch.arange(10.0).reshape(10, 1))
    model, optimizer, loader = accelerator.prepare(
        model, optimizer, DataLoader(rows, batch_size=1)
    )
    weights, norms = [], []
    for _ in range(2):
        for (x,) in loader:
            with accelerator.accumulate(model):
                accelerator.backward((model(x) - 1).pow(2).mean())
                if accelerator.sync_gradients:
                    norms.append(
                        float(accelerator.clip_grad_norm_(model.parameters(), 20.0))
                    )
                optimizer.step()
                optimizer.zero_grad()
            weights.append(accelerator.unwrap_model(model).weight.item())
    return [weights, norms]


PROCESSES = (1, 2)
