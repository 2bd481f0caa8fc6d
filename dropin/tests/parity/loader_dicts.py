"""Batches that are dicts with text."""

import torch
from torch.utils.data import DataLoader

from accelerate import Accelerator


def run() -> object:
    rows = [{"x": torch.tensor([index]), "text": f"row {index}"} for index in range(8)]
    accelerator = Accelerator(cpu=True)
    return [
        [batch["x"].flatten().tolist(), batch["text"]]
        for batch in accelerator.prepare(DataLoader(rows, batch_size=2))
    ]


PROCESSES = (1, 2)
