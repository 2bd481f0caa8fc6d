"""Each sample once in metrics, for sizes that do not divide."""

import torch
from torch.utils.data import DataLoader, TensorDataset

from accelerate import Accelerator


def run() -> object:
    accelerator = Accelerator(cpu=True)
    counted_rows = []
    for size in (5, 8, 9, 13):
        loader = accelerator.prepare(
            DataLoader(TensorDataset(torch.arange(size)), batch_size=3)
        )
        rows = [accelerator.gather_for_metrics(x) for (x,) in loader]
        counted_rows.append(torch.cat(rows).tolist())
    return counted_rows


PROCESSES = (1, 2)
