"""A stream every rank reads, keeping its part."""

import torch
from torch.utils.data import DataLoader, IterableDataset

from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, gather_object


class Stream(IterableDataset):
    def __iter__(self):
        return iter(torch.arange(11))


def run() -> object:
    config = DataLoaderConfiguration(dispatch_batches=False)
    loader = Accelerator(cpu=True, dataloader_config=config).prepare(
        DataLoader(Stream(), batch_size=2)
    )
    return gather_object([[x.tolist() for x in loader]])


PROCESSES = (1, 2)
