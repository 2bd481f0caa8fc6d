"""free_memory forgets what was prepared."""

import torch
from torch import nn

from accelerate import Accelerator


def run() -> object:
    accelerator = Accelerator(cpu=True)
    model, optimizer = accelerator.prepare(
        m := nn.Linear(1, 1), torch.optim.SGD(m.parameters(), lr=0.1)
    )
    counts = [len(accelerator._models), len(accelerator._optimizers)]
    result = accelerator.free_memory(model, optimizer)
    return [counts, result, len(accelerator._models), accelerator.free_memory()]


PROCESSES = (1, 2)
