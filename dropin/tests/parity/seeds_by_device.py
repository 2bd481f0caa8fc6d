"""set_seed with one seed for each process."""

import random

import torch

from accelerate import Accelerator
from accelerate.utils import set_seed


def run() -> object:
    accelerator = Accelerator(cpu=True)
    set_seed(5, device_specific=True)
    return [random.random(), torch.rand(1).item(), accelerator.process_index]


PROCESSES = (1, 2)
