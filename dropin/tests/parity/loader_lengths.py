"""Lengths and totals of prepared loaders."""

import torch
from torch.utils.data import DataLoader, TensorDataset

from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration


def run() -> object:
    lengths = []
    for options in (
        {},
        {"split_batches": True},
        {"dispatch_batches": True},
        {"even_batches": False},
    ):
        accelerator = Accelerator(
            cpu=True, dataloader_config=DataLoaderConfiguration(**options)
        )
        for size in (7, 8):
            loader = accelerator.prepare(
                DataLoader(TensorDataset(torch.arange(size)), batch_size=2)
            )
            lengths.append([len(loader), loader.total_dataset_length])
    return lengths


PROCESSES = (1, 2)
