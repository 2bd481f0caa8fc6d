"""A second Accelerator may not change the precision."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accelerate import Accelerator


def run() -> object:
    Accelerator(cpu=True, mixed_precision="no")
    try:
        Accelerator(mixed_precision="bf16")
    except ValueError as error:
        return str(error)
    return None


PROCESSES = (1, 2)
