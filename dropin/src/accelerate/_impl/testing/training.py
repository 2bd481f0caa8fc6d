"""A tiny regression to train in tests."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset


class RegressionDataset(Dataset[dict[str, float]]):
    """Points on a line, with noise."""

    def __init__(self, a: float = 2, b: float = 3, length: int = 64, seed: int | None = None) -> None:
        rng = np.random.default_rng(seed)
        self.length = length
        self.x = rng.normal(size=(length,)).astype(np.float32)
        self.y = a * self.x + b + rng.normal(scale=0.1, size=(length,)).astype(np.float32)

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, i: int) -> dict[str, float]:
        return {"x": self.x[i], "y": self.y[i]}


class RegressionModel(nn.Module):
    """A line."""

    def __init__(self, a: float = 0, b: float = 0, double_output: bool = False) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.tensor(a).float())
        self.b = nn.Parameter(torch.tensor(b).float())
        self.first_batch = True

    def forward(self, x: Tensor | None = None) -> Tensor:
        assert x is not None, "the model needs an input"
        if self.first_batch:
            print(f"Model dtype: {self.a.dtype}, {self.b.dtype}. Input dtype: {x.dtype}")  # noqa: T201  as the original
            self.first_batch = False
        return x * self.a + self.b
