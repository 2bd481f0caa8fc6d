"""Repeated blocks compiled in place or one by one."""

import torch
from torch import nn

from accelerate.utils import (
    compile_regions_deepspeed,
    has_compiled_regions,
    is_compiled_module,
)


def run() -> object:
    model = nn.ModuleDict(
        {
            "blocks": nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)]),
            "head": nn.Linear(2, 1),
        }
    )
    compile_regions_deepspeed(model, backend="eager")
    compiled = [block._compiled_call_impl is not None for block in model["blocks"]]
    return [
        compiled,
        is_compiled_module(model),
        is_compiled_module(torch.compile(nn.Linear(2, 2), backend="eager")),
        has_compiled_regions(nn.Linear(2, 2)),
    ]


PROCESSES = (1,)
