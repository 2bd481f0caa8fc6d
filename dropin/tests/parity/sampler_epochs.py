"""The seedable sampler's order by epoch and seed."""

import torch

from accelerate.data_loader import SeedableRandomSampler


def run() -> object:
    sampler = SeedableRandomSampler(range(6), generator=torch.Generator(), data_seed=3)
    found = [list(sampler)]
    sampler.set_epoch(2)
    return [*found, list(sampler)]


PROCESSES = (1,)
