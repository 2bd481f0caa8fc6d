"""Mixed precision switched off in a block."""

import torch
from torch import nn

from accelerate import Accelerator
from accelerate.utils import AutocastKwargs


def run() -> object:
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    model = nn.Linear(4, 4)
    x = torch.linspace(-1, 1, 8).view(2, 4)
    with accelerator.autocast():
        inside = model(x)
    with accelerator.autocast(AutocastKwargs(enabled=False)):
        off = model(x)
    return [str(inside.dtype), str(off.dtype), off.tolist()]


PROCESSES = (1,)
