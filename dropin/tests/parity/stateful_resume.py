"""A stateful loader goes on behind the batch at which its state was taken."""

import torch
from torch.utils.data import DataLoader, TensorDataset

from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration


def run() -> object:
    config = DataLoaderConfiguration(use_stateful_dataloader=True)
    accelerator = Accelerator(cpu=True, dataloader_config=config)
    loader = accelerator.prepare(
        DataLoader(TensorDataset(torch.arange(16)), batch_size=2)
    )
    batches = iter(loader)
    next(batches)
    state = loader.state_dict()
    remaining_batches = [x.tolist() for (x,) in batches]
    loader.load_state_dict(state)
    return [remaining_batches, [x.tolist() for (x,) in loader]]


PROCESSES = (1, 2)
