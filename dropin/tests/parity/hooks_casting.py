"""Weights stored in one dtype and computed in another."""

import torch
from torch import nn

from accelerate.big_modeling import attach_layerwise_casting_hooks


def run() -> object:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 4), nn.LayerNorm(4), nn.Linear(4, 2))
    attach_layerwise_casting_hooks(
        model, storage_dtype=torch.bfloat16, compute_dtype=torch.float32
    )
    out = model(torch.ones(1, 2))
    return [[str(p.dtype) for p in model.parameters()], str(out.dtype), out.tolist()]


PROCESSES = (1,)
