"""gather_for_metrics on tuples and dicts."""

import torch
from torch.utils.data import DataLoader, TensorDataset

from accelerate import Accelerator


def run() -> object:
    accelerator = Accelerator(cpu=True)
    loader = accelerator.prepare(
        DataLoader(TensorDataset(torch.arange(10), torch.arange(10) * 2), batch_size=4)
    )
    gathered_pairs = []
    for x, y in loader:
        pair = accelerator.gather_for_metrics((x, {"y": y}))
        gathered_pairs.append([pair[0].tolist(), pair[1]["y"].tolist()])
    return gathered_pairs


PROCESSES = (1, 2)
