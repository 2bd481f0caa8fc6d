"""cpu_offload_with_hook runs models one after another."""

import torch
from torch import nn

from accelerate import cpu_offload_with_hook


def run() -> object:
    torch.manual_seed(0)
    first, hook = cpu_offload_with_hook(nn.Linear(2, 2), "cpu")
    second, second_hook = cpu_offload_with_hook(
        nn.Linear(2, 2), "cpu", prev_module_hook=hook
    )
    out = second(first(torch.ones(1, 2)))
    second_hook.offload()
    hook.remove()
    return [out.tolist(), str(second.weight.device), first(torch.ones(1, 2)).tolist()]


PROCESSES = (1,)
