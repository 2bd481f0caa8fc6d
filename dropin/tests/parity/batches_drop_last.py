"""drop_last leaves the short rest out."""

import torch
from torch.utils.data import DataLoader, TensorDataset

from accelerate import Accelerator
from accelerate.utils import gather_object


def run() -> object:
    loader = Accelerator(cpu=True).prepare(
        DataLoader(TensorDataset(torch.arange(13)), batch_size=4, drop_last=True)
    )
    return gather_object([[len(loader), [x.tolist() for (x,) in loader]]])


PROCESSES = (1, 2)
