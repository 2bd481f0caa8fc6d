"""Dtypes inside of blocks of an Accelerator's precision."""

import torch
from torch import nn

from accelerate import Accelerator


def run() -> object:
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    model = accelerator.prepare(nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2)))
    kept = []
    accelerator.unwrap_model(model)[0].register_forward_hook(
        lambda module, args, out: kept.append(str(out.dtype))
    )
    out = model(torch.ones(1, 2))
    return [kept, str(out.dtype)]


PROCESSES = (1, 2)
