"""A small training for the tests of this folder, under strategy='xla' and in plain torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from hasten import Accelerator, XLAConfig

# Any in this file: prepared objects, and further arguments of an Accelerator.

Precision = Literal["no", "bf16"]


class Net(nn.Module):
    """Layers with a tie, a repeated block and a normalisation of the given kind; 10 classes."""

    def __init__(
        self, norm: type[nn.Module] = nn.BatchNorm1d, dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 16)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(2)
        )
        self.norm = norm(16)
        self.drop = nn.Dropout(dropout)
        self.head = nn.Linear(16, 10, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        """Scores of the classes."""
        hidden: Tensor = self.embed(x)
        for block in self.blocks:
            hidden = block(hidden)
        scores: Tensor = self.head(self.drop(self.norm(hidden)))
        return scores


def net(
    norm: type[nn.Module] = nn.BatchNorm1d, dropout: float = 0.0, seed: int = 5
) -> Net:
    """The same weights every time."""
    torch.manual_seed(seed)
    return Net(norm, dropout)


def parts_of(
    model: nn.Module,
) -> tuple[nn.Module, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    """A model with the optimizer and the schedule of every training here."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 4, 0.7)


def plain(
    model: nn.Module,
    data: tuple[Tensor, Tensor],
    steps: Sequence[list[list[int]]],
    every: int,
    clip: float | None,
) -> list[float]:
    """Train a model in plain torch; each step has groups of rows, and its loss is the mean of theirs. Returns the losses."""
    _, optimizer, schedule = parts_of(model)
    x, y = data
    losses = []
    for index, groups in enumerate(steps, 1):
        loss = torch.stack(
            [nn.functional.cross_entropy(model(x[rows]), y[rows]) for rows in groups]
        ).mean()
        losses.append(loss.item())
        # a window of what is left begins after this step
        short = len(steps) - len(steps) % every
        (loss / (every if index <= short else len(steps) - short)).backward()  # type: ignore[no-untyped-call]
        if index % every == 0 or index == len(steps):
            if clip is not None:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
    return losses


@dataclass
class Run:
    """A training under strategy='xla'."""

    accelerator: Accelerator
    model: Any
    optimizer: Any
    schedule: Any
    loader: Any
    clip: float | None = None
    losses: list[Tensor] = field(default_factory=list)
    rows: list[list[int]] = field(default_factory=list)
    """The numbers of the samples in each batch, where a sample begins with its number."""

    @classmethod
    def made(
        cls,
        model: nn.Module,
        data: Dataset[Any],
        num_rows: int,
        every: int = 1,
        clip: float | None = None,
        precision: Precision = "no",
        shards: bool = False,
        **options: Any,
    ) -> Run:
        """The parts of a training, prepared."""
        accelerator = Accelerator(
            strategy="xla",
            xla=XLAConfig(fsdp_v2=shards),
            gradient_accumulation_steps=every,
            mixed_precision=precision,
            **options,
        )
        prepared: tuple[Any, Any, Any, Any] = accelerator.prepare(
            *parts_of(model), DataLoader(data, batch_size=num_rows)
        )
        return cls(accelerator, *prepared, clip)

    def train(self, stop: int | None = None, folder: Path | None = None) -> Run:
        """Train to the end of the epoch; save after batch `stop`."""
        for index, (*numbers, x, y) in enumerate(self.loader, 1):
            with self.accelerator.accumulate(self.model):
                loss = nn.functional.cross_entropy(self.model(x), y)
                self.losses.append(loss.detach())
                self.accelerator.backward(loss)
                if self.clip is not None:
                    self.accelerator.clip_grad_norm_(self.model.parameters(), self.clip)
                self.optimizer.step()
                self.schedule.step()
                self.optimizer.zero_grad()
            self.rows += [number.tolist() for number in numbers]
            if index == stop:
                self.accelerator.save_state(folder)
        return self

    def numbers(self) -> dict[str, Tensor]:
        """Every weight, buffer and moment, in host memory."""
        tensors = {name: value.cpu() for name, value in self.model.state_dict().items()}
        for index, state in enumerate(self.optimizer.state.values()):
            tensors |= {f"{index}.{key}": value.cpu() for key, value in state.items()}
        return tensors


def assert_equal(first: dict[str, Tensor], second: dict[str, Tensor]) -> None:
    """Compare two sets of numbers bit for bit."""
    assert first.keys() == second.keys()
    assert [name for name in first if not torch.equal(first[name], second[name])] == []
