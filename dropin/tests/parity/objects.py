"""gather_object and broadcast_object_list."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accelerate import Accelerator
from accelerate.utils import broadcast_object_list, gather_object


def run() -> object:
    rank = Accelerator(cpu=True).process_index
    return [gather_object([{"rank": rank}, "x"]), broadcast_object_list([rank, "from main"])]


PROCESSES = (1, 2)
