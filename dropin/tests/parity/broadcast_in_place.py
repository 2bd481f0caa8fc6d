"""A broadcast is written into the tensors that were given; padding along a dimension that is not there changes nothing."""

import torch

from accelerate import Accelerator
from accelerate.utils import broadcast, gather_object, pad_across_processes


def run() -> object:
    rank = Accelerator(cpu=True).process_index
    tensor, tree = torch.tensor([rank + 1.0]), {"x": [torch.tensor([rank, 5])]}
    is_same_object = broadcast(tensor) is tensor
    broadcast(tree)
    short = pad_across_processes(torch.ones(rank + 1), dim=3)
    return gather_object(
        [[is_same_object, tensor.tolist(), tree["x"][0].tolist(), short.tolist()]]
    )


PROCESSES = (1, 2)
