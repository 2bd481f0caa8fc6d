"""Each rank's share of lists, dicts and tensors."""

import torch

from accelerate import PartialState
from accelerate.utils import gather_object


def run() -> object:
    state = PartialState(cpu=True)
    shares = []
    for inputs in (
        list(range(5)),
        {"a": [1, 2, 3], "b": ["x", "y", "z"]},
        torch.arange(3),
    ):
        for padding in (False, True):
            with state.split_between_processes(inputs, apply_padding=padding) as share:
                shares.append(
                    share.tolist() if isinstance(share, torch.Tensor) else share
                )
    return gather_object([shares])


PROCESSES = (1, 2)
