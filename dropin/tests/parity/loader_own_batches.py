"""A batch sampler of one's own, and samples that are not batched."""

import torch
from torch.utils.data import DataLoader, TensorDataset

from accelerate import Accelerator


def run() -> object:
    accelerator = Accelerator(cpu=True)
    batch_indices = [[0, 1, 2], [3], [4, 5], [6, 7]]
    first = accelerator.prepare(
        DataLoader(TensorDataset(torch.arange(8)), batch_sampler=batch_indices)
    )
    second = accelerator.prepare(
        DataLoader(TensorDataset(torch.arange(4)), batch_size=None)
    )
    return [[x.tolist() for (x,) in first], [x.tolist() for (x,) in second]]


PROCESSES = (1,)
