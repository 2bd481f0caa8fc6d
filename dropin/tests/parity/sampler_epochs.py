"""The seedable sampler's order by epoch and seed."""

import torch

from accelerate.data_loader import SeedableRandomSampler


def run() -> object:
    sampler = SeedableRandomSampler(range(6), generator=torch.Generator(), data_seed=3)
    orders = [list(sampler)]
    sampler.set_epoch(2)
    return [*orders, list(sampler)]


PROCESSES = (1,)
