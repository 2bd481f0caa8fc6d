"""Budgets of a model that is spread evenly over CPU memory."""

from torch import nn

from accelerate.utils import get_balanced_memory


def run() -> object:
    return {
        str(key): value
        for key, value in get_balanced_memory(
            nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 5)),
            max_memory={"cpu": 10_000},
        ).items()
    }


PROCESSES = (1,)
