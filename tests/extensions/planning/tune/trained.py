"""A small training script for trials of `hasten tune`: convolutions, repeated blocks, a whole step as a function."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from hasten import Accelerator


class Block(nn.Module):
    """A small residual block."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(4, 4, 3, padding=1), nn.GroupNorm(2, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + F.relu(self.norm(self.conv(x)))
        return out


def main() -> None:
    """Train for some hundred steps."""
    torch.manual_seed(0)
    accelerator = Accelerator()
    net = nn.Sequential(
        nn.Conv2d(3, 4, 1),
        nn.Sequential(Block(), Block()),
        nn.Flatten(),
        nn.Linear(4 * 64, 5),
    )
    data = TensorDataset(torch.randn(800, 3, 8, 8), torch.randint(5, (800,)))
    loader = DataLoader(data, batch_size=4)
    model, optimizer, loader = accelerator.prepare(
        net, torch.optim.AdamW(net.parameters(), lr=1e-3), loader
    )

    @accelerator.capture_step
    def train_step(x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(model(x), y)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    for x, y in loader:
        train_step(x, y)
    accelerator.save_state("must_not_be_there")


if __name__ == "__main__":
    main()
