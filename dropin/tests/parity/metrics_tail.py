"""gather_for_metrics gives each sample once, for tensors and objects."""

import torch
from torch.utils.data import DataLoader, TensorDataset

from accelerate import Accelerator


def run() -> object:
    accelerator = Accelerator(cpu=True)
    gathered_by_size = []
    for size in (16, 13, 9):
        loader = accelerator.prepare(
            DataLoader(TensorDataset(torch.arange(size)), batch_size=4)
        )
        gathered_rows, words = [], []
        for (x,) in loader:
            gathered_rows += accelerator.gather_for_metrics(x).tolist()
            words += accelerator.gather_for_metrics(
                [str(v) for v in x.tolist()], use_gather_object=True
            )
        gathered_by_size.append([gathered_rows, words])
    return gathered_by_size


PROCESSES = (1, 2)
