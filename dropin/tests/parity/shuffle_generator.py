"""A loader with a generator of its own, in shards: the order of two epochs and the draws between batches."""

import torch
from torch.utils.data import DataLoader, RandomSampler, TensorDataset

from accelerate import Accelerator
from accelerate.utils import gather_object, set_seed


def run() -> object:
    set_seed(5)
    accelerator = Accelerator(cpu=True)
    numbers = TensorDataset(torch.arange(12.0))
    sampler = RandomSampler(numbers, generator=torch.Generator().manual_seed(2))
    loaders = (
        DataLoader(
            numbers,
            batch_size=2,
            shuffle=True,
            generator=torch.Generator().manual_seed(1),
        ),
        DataLoader(numbers, batch_size=2, sampler=sampler),
        DataLoader(numbers, batch_size=2, shuffle=True),
    )
    read_batches = []
    for loader in loaders:
        prepared = accelerator.prepare(loader)
        for _ in range(2):
            read_batches += [
                [batch[0].tolist(), torch.rand(1).item()] for batch in prepared
            ]
    return gather_object([read_batches])


PROCESSES = (1, 2)
