"""Objects gathered for metrics."""

import torch
from torch.utils.data import DataLoader, TensorDataset

from accelerate import Accelerator


def run() -> object:
    accelerator = Accelerator(cpu=True)
    loader = accelerator.prepare(
        DataLoader(TensorDataset(torch.arange(6)), batch_size=2)
    )
    return [
        accelerator.gather_for_metrics(
            [f"row {int(row)}" for row in x], use_gather_object=True
        )
        for (x,) in loader
    ]


PROCESSES = (1, 2)
