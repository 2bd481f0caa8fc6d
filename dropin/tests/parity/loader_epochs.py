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
    rows_by_epoch = []
    for epoch in (0, 3):
        loader.set_epoch(epoch)
        rows_by_epoch.append([x.tolist() for x in loader])
    return rows_by_epoch


PROCESSES = (1, 2)
