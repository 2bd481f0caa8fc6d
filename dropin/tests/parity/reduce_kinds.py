"""Sums, means and nothing, of nested containers."""

import torch

from accelerate import Accelerator
from accelerate.utils import reduce


def run() -> object:
    accelerator = Accelerator(cpu=True)
    tree = {"x": torch.arange(3.0) + accelerator.process_index, "y": (torch.ones(1),)}
    return [str(reduce(tree, kind)) for kind in ("sum", "mean")] + [
        str(accelerator.reduce(tree["x"], "sum"))
    ]


PROCESSES = (1, 2)
