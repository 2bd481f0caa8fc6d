"""Outputs of a bf16 model come back in float32."""

import torch
from torch import nn

from accelerate import Accelerator


def run() -> object:
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    model = accelerator.prepare(nn.Linear(2, 2))
    with accelerator.autocast():
        inside = (torch.ones(2, 2) @ torch.ones(2, 2)).dtype
    return [
        str(model(torch.ones(1, 2)).dtype),
        str(inside),
        accelerator.mixed_precision,
        str(accelerator.state.mixed_precision),
    ]


PROCESSES = (1, 2)
