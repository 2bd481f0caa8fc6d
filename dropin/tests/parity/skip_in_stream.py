"""Batches of a stream left out at the front."""

import torch
from torch.utils.data import DataLoader, IterableDataset

from accelerate import Accelerator


class Stream(IterableDataset):
    def __iter__(self):
        return iter(torch.arange(16))

    def __len__(self):
        return 16


def run() -> object:
    accelerator = Accelerator(cpu=True)
    loader = accelerator.prepare(DataLoader(Stream(), batch_size=2))
    return [
        [x.tolist() for x in accelerator.skip_first_batches(loader, count)]
        for count in (0, 1, 3)
    ]


PROCESSES = (1, 2)
