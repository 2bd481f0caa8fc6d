"""A checkpoint in a folder that each process made for itself: a loader goes on behind the batch at which it was saved."""

import tempfile

import torch
from torch.utils.data import DataLoader, TensorDataset

from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration


def run() -> object:
    config = DataLoaderConfiguration(use_stateful_dataloader=True)
    accelerator = Accelerator(cpu=True, dataloader_config=config)
    loader = accelerator.prepare(
        DataLoader(TensorDataset(torch.arange(22)), batch_size=4)
    )
    folder = tempfile.mkdtemp()
    for number, _ in enumerate(loader):
        if number == 0:
            accelerator.save_state(folder)
    accelerator.load_state(folder)
    return [batch.tolist() for (batch,) in loader]


PROCESSES = (1, 2)
