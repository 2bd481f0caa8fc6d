"""When gradients are synchronised, also at the loader's end."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accelerate import Accelerator


def run() -> object:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=3)
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(TensorDataset(torch.ones(16, 1)), batch_size=2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    sync_flags = []
    for _ in range(2):
        for (x,) in loader:
            with accelerator.accumulate(model):
                accelerator.backward(model(x).sum())
                sync_flags.append(accelerator.sync_gradients)
    return sync_flags


PROCESSES = (1, 2)
