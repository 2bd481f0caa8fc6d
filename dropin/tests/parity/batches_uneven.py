"""even_batches=False: the last samples are read once."""

import torch
from torch.utils.data import DataLoader, TensorDataset

from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, gather_object


def run() -> object:
    config = DataLoaderConfiguration(even_batches=False)
    loader = Accelerator(cpu=True, dataloader_config=config).prepare(
        DataLoader(TensorDataset(torch.arange(13)), batch_size=4)
    )
    return gather_object([[x.tolist() for (x,) in loader]])


PROCESSES = (1, 2)
