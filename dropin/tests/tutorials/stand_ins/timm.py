"""What a tutorial needs of the library of this name: a small network in the shape of a pretrained one."""

import torch
from torch import nn


class Network(nn.Module):
    """A few layers behind the names that pretrained vision models have."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.default_cfg = {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}
        self.features = nn.Sequential(
            nn.Conv2d(3, 12, 3, stride=2), nn.BatchNorm2d(12), nn.ReLU()
        )
        self.fc = nn.Linear(12, num_classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        pooled: torch.Tensor = self.features(x).mean((2, 3))
        return torch.as_tensor(self.fc(pooled))

    def get_classifier(self) -> nn.Linear:
        return self.fc


def create_model(
    name: str, pretrained: bool = False, num_classes: int = 1000
) -> Network:
    """The network; being "pretrained" is having the same weights every time."""
    with torch.random.fork_rng():
        torch.manual_seed(len(name) if pretrained else torch.seed())
        return Network(num_classes)
