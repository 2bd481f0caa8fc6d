"""Random states that loaders bring together."""

import torch
from torch.utils.data import DataLoader, TensorDataset

from accelerate import Accelerator


def run() -> object:
    accelerator = Accelerator(cpu=True, rng_types=["torch"])
    loader = accelerator.prepare(
        DataLoader(TensorDataset(torch.arange(4)), batch_size=2)
    )
    torch.manual_seed(accelerator.process_index)
    list(loader)
    return [torch.rand(1).item(), accelerator.rng_types]


PROCESSES = (1, 2)
