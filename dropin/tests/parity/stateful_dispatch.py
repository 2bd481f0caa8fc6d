"""A stateful loader whose batches the main process hands out resumes too."""

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
    config = DataLoaderConfiguration(
        use_stateful_dataloader=True, dispatch_batches=True
    )
    loader = Accelerator(cpu=True, dataloader_config=config).prepare(
        DataLoader(Stream(), batch_size=2)
    )
    batches = iter(loader)
    next(batches)
    state = loader.state_dict()
    remaining_batches = [x.tolist() for x in batches]
    loader.load_state_dict(state)
    return [type(loader).__name__, remaining_batches, [x.tolist() for x in loader]]


PROCESSES = (1,)
