"""The short end of a stream dropped."""

import torch
from torch.utils.data import DataLoader, IterableDataset

from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration


class Stream(IterableDataset):
    def __iter__(self):
        return iter(torch.arange(16))

    def __len__(self):
        return 16


def run() -> object:
    stream_batches = []
    for dispatch in (False, True):
        accelerator = Accelerator(
            cpu=True,
            dataloader_config=DataLoaderConfiguration(dispatch_batches=dispatch),
        )
        stream_batches.append(
            [
                x.tolist()
                for x in accelerator.prepare(
                    DataLoader(Stream(), batch_size=3, drop_last=True)
                )
            ]
        )
    return stream_batches


PROCESSES = (1, 2)
