"""Which samples each rank reads, and the length."""

import torch
from torch.utils.data import DataLoader, TensorDataset

from accelerate import Accelerator
from accelerate.utils import gather_object


def run() -> object:
    batches_by_size = []
    for size, batch in ((16, 4), (10, 4), (13, 3), (3, 4)):
        loader = Accelerator(cpu=True).prepare(
            DataLoader(TensorDataset(torch.arange(size)), batch_size=batch)
        )
        batches_by_size.append(
            gather_object([[len(loader), [x.tolist() for (x,) in loader]]])
        )
    return batches_by_size


PROCESSES = (1, 2)
