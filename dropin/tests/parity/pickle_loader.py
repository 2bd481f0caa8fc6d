"""A prepared loader that went through pickle gives the same batches."""

import pickle

import torch
from torch.utils.data import DataLoader, TensorDataset

from accelerate import Accelerator


def run() -> object:
    loader = pickle.loads(
        pickle.dumps(
            Accelerator(cpu=True).prepare(
                DataLoader(TensorDataset(torch.arange(8)), batch_size=2)
            )
        )
    )
    return [type(loader).__name__, len(loader), [x.tolist() for (x,) in loader]]


PROCESSES = (1, 2)
