"""Unwrapping a prepared model, also without its autocast."""

import torch
from torch import nn

from accelerate import Accelerator
from accelerate.utils import extract_model_from_parallel


def run() -> object:
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    net = nn.Linear(2, 2)
    model = accelerator.prepare(net)
    are_unwrapped = (
        accelerator.unwrap_model(model) is net,
        extract_model_from_parallel(model) is net,
    )
    plain = accelerator.unwrap_model(model, keep_fp32_wrapper=False)
    return [*are_unwrapped, str(plain(torch.ones(1, 2)).dtype)]


PROCESSES = (1, 2)
