"""Preparing again what is prepared gives the same objects and keeps the lists as they are."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accelerate import Accelerator


def run() -> object:
    accelerator = Accelerator(cpu=True)
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    first = accelerator.prepare(
        model, optimizer, DataLoader(TensorDataset(torch.arange(8)), batch_size=2)
    )
    second = accelerator.prepare(*first)
    lists = accelerator._optimizers, accelerator._dataloaders
    return [
        [a is b for a, b in zip(first, second, strict=True)],
        [len(prepared_list) for prepared_list in lists],
    ]


PROCESSES = (1, 2)
