"""Shuffling with a seedable sampler and a data seed."""

import torch
from torch.utils.data import DataLoader, TensorDataset

from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, gather_object, set_seed


def run() -> object:
    accelerator = Accelerator(
        cpu=True,
        dataloader_config=DataLoaderConfiguration(
            use_seedable_sampler=True, data_seed=9
        ),
    )
    set_seed(5)
    loader = accelerator.prepare(
        DataLoader(TensorDataset(torch.arange(12)), batch_size=2, shuffle=True)
    )
    orders = [[x.tolist() for (x,) in loader] for _ in range(2)]
    loader.set_epoch(0)
    return gather_object([[*orders, [x.tolist() for (x,) in loader]]])


PROCESSES = (1, 2)
