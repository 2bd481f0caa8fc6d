"""Model, data and variables of the runs on Ray; imports no ray, which changes the environment of the importing process."""

from __future__ import annotations

from typing import Final

import torch
from torch import nn
from torch.utils.data import Dataset

SAMPLES: Final = 96
QUICK: Final = {
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.2",
    "TORCH_PROCESS_GROUP_SHUTDOWN_TIMEOUT_S": "2",
    # on a busy machine, Ray and its workers start later than Ray expects
    "RAY_raylet_start_wait_time_s": "300",
    "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "600",
}
"""Variables of Ray with which lost workers are noticed soon, and slow ones have time."""


class Numbered(Dataset[tuple[torch.Tensor, torch.Tensor, int]]):
    """Samples that name themselves."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(3)
        self.inputs = torch.randn(SAMPLES, 8, generator=generator)
        self.labels = torch.randn(SAMPLES, 1, generator=generator)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor, int]:
        return self.inputs[index], self.labels[index], index


def network() -> nn.Module:
    """A small model with the same weights everywhere."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
