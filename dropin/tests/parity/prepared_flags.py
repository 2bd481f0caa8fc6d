"""What prepare() returns says that it is prepared."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accelerate import Accelerator


def run() -> object:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    prepared = Accelerator(cpu=True).prepare(
        model,
        optimizer,
        scheduler,
        DataLoader(TensorDataset(torch.arange(8)), batch_size=2),
    )
    return [
        getattr(prepared_object, "_is_accelerate_prepared", None)
        for prepared_object in prepared
    ]


PROCESSES = (1, 2)
