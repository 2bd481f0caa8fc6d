"""Shuffling without a seedable sampler, over two epochs."""

import torch
from torch.utils.data import DataLoader, TensorDataset

from accelerate import Accelerator
from accelerate.utils import gather_object, set_seed


def run() -> object:
    accelerator = Accelerator(cpu=True)
    set_seed(5)
    loader = accelerator.prepare(
        DataLoader(TensorDataset(torch.arange(12)), batch_size=2, shuffle=True)
    )
    return gather_object([[[x.tolist() for (x,) in loader] for _ in range(2)]])


PROCESSES = (1, 2)
