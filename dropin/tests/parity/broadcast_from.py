"""Tensors and objects from another process than the first."""

import torch

from accelerate import Accelerator
from accelerate.utils import broadcast, broadcast_object_list


def run() -> object:
    accelerator = Accelerator(cpu=True)
    rank, last = accelerator.process_index, accelerator.num_processes - 1
    tree = {"x": torch.full((2,), float(rank)), "y": [torch.tensor([rank])]}
    return [
        str(broadcast(tree, from_process=last)),
        broadcast_object_list([rank, "a"], from_process=last),
    ]


PROCESSES = (1, 2)
