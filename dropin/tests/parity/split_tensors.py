"""Tensors dealt out, with and without padding."""

import torch

from accelerate import PartialState


def run() -> object:
    state, shares = PartialState(cpu=True), []
    for size in (3, 4, 5):
        for padding in (False, True):
            with state.split_between_processes(
                torch.arange(size), apply_padding=padding
            ) as share:
                shares.append(share.tolist())
    return shares


PROCESSES = (1, 2)
