"""The user's module inside wrappers."""

import torch
from torch import nn

from accelerate import Accelerator
from accelerate.utils import extract_model_from_parallel


def run() -> object:
    accelerator = Accelerator(cpu=True)
    inner = nn.Linear(2, 2)
    prepared = accelerator.prepare(inner)
    compiled = torch.compile(inner, backend="eager")
    return [
        extract_model_from_parallel(prepared) is inner,
        extract_model_from_parallel(compiled, keep_torch_compile=False) is inner,
        accelerator.unwrap_model(prepared) is inner,
    ]


PROCESSES = (1, 2)
