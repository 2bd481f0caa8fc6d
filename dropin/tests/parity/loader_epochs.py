"""set_epoch reaches a dataset and a sampler of one's own."""

import torch
from torch.utils.data import DataLoader, Dataset

from accelerate import Accelerator


class Rows(Dataset):
    epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return 8

    def __getitem__(self, index):
        return torch.tensor(index + 100 * self.epoch)


def run() -> object:
    loader = Accelerator(cpu=True).prepare(DataLoader(Rows(), batch_size=2))
    found = []
    for epoch in (0, 3):
        loader.set_epoch(epoch)
        found.append([x.tolist() for x in loader])
    return found


PROCESSES = (1, 2)
