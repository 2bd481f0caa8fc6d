"""Batches the main process hands out, and the random numbers every process draws between them."""

import random

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.utils import gather_object, set_seed


class Noisy(Dataset):
    def __len__(self):
        return 10

    def __getitem__(self, index):
        return torch.tensor([index, torch.rand(1).item(), random.random()])


class Stream(IterableDataset):
    def __iter__(self):
        for index in range(10):
            yield torch.tensor([index, torch.rand(1).item()])


def run() -> object:
    set_seed(3)
    accelerator = Accelerator(
        cpu=True, dataloader_config=DataLoaderConfiguration(dispatch_batches=True)
    )
    numbers = TensorDataset(torch.arange(12.0))
    loaders = (
        DataLoader(numbers, batch_size=2, shuffle=True),
        DataLoader(numbers, batch_size=2),
        DataLoader(Noisy(), batch_size=2, shuffle=True),
        DataLoader(Stream(), batch_size=2),
        DataLoader(
            numbers,
            batch_size=2,
            shuffle=True,
            generator=torch.Generator().manual_seed(1),
        ),
    )
    read_batches = []
    for loader in loaders:
        prepared = accelerator.prepare(loader)
        for _ in range(2):
            for batch in prepared:
                rows = batch if torch.is_tensor(batch) else batch[0]
                read_batches.append([rows.flatten().tolist(), torch.rand(1).item()])
    return gather_object([read_batches])


PROCESSES = (1, 2)
