"""Padding to the largest size any rank has."""

import torch

from accelerate import Accelerator


def run() -> object:
    accelerator = Accelerator(cpu=True)
    rank = accelerator.process_index
    x = torch.full((rank + 1, 2), float(rank))
    rows = accelerator.gather(accelerator.pad_across_processes(x, dim=0, pad_index=-1))
    first = accelerator.gather(
        accelerator.pad_across_processes(
            x.T.contiguous(), dim=1, pad_index=7, pad_first=True
        )
    )
    return [rows.tolist(), first.tolist()]


PROCESSES = (1, 2)
