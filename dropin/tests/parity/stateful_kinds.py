"""With use_stateful_dataloader, loaders are torchdata's and tell how far they are."""

import torch
from torch.utils.data import DataLoader, TensorDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration


def run() -> object:
    config = DataLoaderConfiguration(use_stateful_dataloader=True)
    loader = Accelerator(cpu=True, dataloader_config=config).prepare(
        DataLoader(TensorDataset(torch.arange(12)), batch_size=2)
    )
    loader_states = []
    for count, _ in enumerate(loader, 1):
        state = loader.state_dict()
        loader_states.append(
            [count, state["_num_yielded"], state["_iterator_finished"]]
        )
    return [
        isinstance(loader, StatefulDataLoader),
        isinstance(loader, DataLoader),
        loader_states[:-1],
    ]


PROCESSES = (1, 2)
