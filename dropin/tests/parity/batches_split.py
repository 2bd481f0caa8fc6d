"""split_batches: the loader's batch size is the global one."""

import torch
from torch.utils.data import DataLoader, TensorDataset

from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, gather_object


def run() -> object:
    config = DataLoaderConfiguration(split_batches=True)
    batches_by_size = []
    for size in (16, 10, 13):
        loader = Accelerator(cpu=True, dataloader_config=config).prepare(
            DataLoader(TensorDataset(torch.arange(size)), batch_size=4)
        )
        batches_by_size.append(
            gather_object([[loader.total_batch_size, [x.tolist() for (x,) in loader]]])
        )
    return batches_by_size


PROCESSES = (1, 2)
