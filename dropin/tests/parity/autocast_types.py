"""Dtypes inside of blocks of an Accelerator's precision."""

import torch
from torch import nn

from accelerate import Accelerator


def run() -> object:
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    model = accelerator.prepare(nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2)))
    layer_dtypes = []
    accelerator.unwrap_model(model)[0].register_forward_hook(
        lambda module, args, out: layer_dtypes.append(str(out.dtype))
    )
    out = model(torch.ones(1, 2))
    return [layer_dtypes, str(out.dtype)]


PROCESSES = (1, 2)
