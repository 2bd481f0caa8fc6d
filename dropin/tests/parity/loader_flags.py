"""GradientState while loaders are read, also nested ones."""

import torch
from torch.utils.data import DataLoader, TensorDataset

from accelerate import Accelerator
from accelerate.state import GradientState


def run() -> object:
    accelerator = Accelerator(cpu=True)
    state = GradientState()
    outer, inner = accelerator.prepare(
        *(DataLoader(TensorDataset(torch.arange(n)), batch_size=2) for n in (8, 6))
    )
    flags = []
    for _ in outer:
        flags.append(
            ["outer", state.in_dataloader, state.end_of_dataloader, state.remainder]
        )
        for _ in inner:
            flags.append(["inner", state.end_of_dataloader, state.remainder])
        flags.append(["back", state.end_of_dataloader])
    return [*flags, state.in_dataloader]


PROCESSES = (1, 2)
