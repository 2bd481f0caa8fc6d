"""set_seed, alike and by device."""

import torch

from accelerate import Accelerator
from accelerate.utils import gather_object, set_seed


def run() -> object:
    Accelerator(cpu=True)
    set_seed(3)
    alike = torch.rand(1).item()
    set_seed(3, device_specific=True)
    return gather_object([[alike, torch.rand(1).item()]])


PROCESSES = (1, 2)
