"""A broadcast is written into the tensors that were given; padding along a dimension that is not there changes nothing."""

import torch

from accelerate import Accelerator
from accelerate.utils import broadcast, gather_object, pad_across_processes


def run() -> object:
    rank = Accelerator(cpu=True).process_index
    one, tree = torch.tensor([rank + 1.0]), {"x": [torch.tensor([rank, 5])]}
    same = broadcast(one) is one
    broadcast(tree)
    short = pad_across_processes(torch.ones(rank + 1), dim=3)
    return gather_object([[same, one.tolist(), tree["x"][0].tolist(), short.tolist()]])


PROCESSES = (1, 2)
