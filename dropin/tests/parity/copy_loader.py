"""A deep copy of a prepared loader reads all samples by itself."""

import copy

import torch
from torch.utils.data import DataLoader, TensorDataset

from accelerate import Accelerator


def run() -> object:
    accelerator = Accelerator(cpu=True)
    loader = accelerator.prepare(
        DataLoader(TensorDataset(torch.arange(8)), batch_size=2, shuffle=True)
    )
    copied_loader = copy.deepcopy(loader)
    gathered = accelerator.gather(torch.cat([x for (x,) in copied_loader]))
    return [
        type(copied_loader).__name__,
        sorted(gathered.tolist()),
        len(loader),
        accelerator.gradient_state.in_dataloader,
    ]


PROCESSES = (1, 2)
