"""A stream is read by the main process and handed out."""

import torch
from torch.utils.data import DataLoader, IterableDataset

from accelerate import Accelerator
from accelerate.utils import gather_object


class Stream(IterableDataset):
    def __iter__(self):
        return iter(torch.arange(11))


def run() -> object:
    loader = Accelerator(cpu=True).prepare(DataLoader(Stream(), batch_size=2))
    return gather_object([[x.tolist() for x in loader]])


PROCESSES = (1, 2)
