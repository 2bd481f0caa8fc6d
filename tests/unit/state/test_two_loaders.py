"""Law: a hand-written loop that reads two loaders side by side resumes after every batch as if it had never stopped."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from hasten import Accelerator

EPOCHS: Final = 2
Pairs = Callable[["Run"], Iterator[tuple[Any, Any]]]  # Any: batches


class Stopped(Exception):
    """The process ended here."""


class Run:
    """A run over a short and a long loader; it saves and stops at one of its points."""

    def __init__(
        self, folder: Path, stop_at: int | None = None, **loader_settings: Any
    ) -> None:
        torch.manual_seed(0)
        self.accelerator = Accelerator(cpu=True, project_dir=str(folder))
        model = nn.Linear(1, 1)
        loaders = [
            DataLoader(
                TensorDataset(torch.arange(float(size))[:, None]),
                batch_size=2,
                shuffle=True,
                **loader_settings,
            )
            for size in (7, 11)
        ]
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
        self.model, self.optimizer, self.short, self.long = self.accelerator.prepare(
            model, optimizer, *loaders
        )
        self.points: list[Any] = []
        self._stop_at = stop_at

    def train(self, pairs: Pairs) -> None:
        for epoch in range(self.short.epoch, EPOCHS):
            for (first,), (second,) in pairs(self):
                self.accelerator.backward(
                    self.model(torch.cat([first, second])).square().mean()
                )
                self.optimizer.step()
                self.optimizer.zero_grad()
                self._pass_point(
                    epoch, first.flatten().tolist(), second.flatten().tolist()
                )
            self._pass_point("end", epoch)

    def _pass_point(self, *point: Any) -> None:
        self.points.append(point)
        if len(self.points) == self._stop_at:
            self.accelerator.save_state()
            raise Stopped


def zip_short_first(run: Run) -> Iterator[tuple[Any, Any]]:
    return zip(run.short, run.long, strict=False)


def zip_long_first(run: Run) -> Iterator[tuple[Any, Any]]:
    return zip(run.long, run.short, strict=False)


def next_beside(run: Run) -> Iterator[tuple[Any, Any]]:
    long_batches = iter(run.long)
    for batch in run.short:
        yield batch, next(long_batches)


def next_now_and_then(run: Run) -> Iterator[tuple[Any, Any]]:
    long_batches = iter(run.long)
    for index, batch in enumerate(run.short, run.short.num_done):
        yield batch, next(long_batches) if index % 2 else batch


def next_over_epochs(run: Run) -> Iterator[tuple[Any, Any]]:
    """Read the long loader to its end before it starts anew, over all epochs of the short one."""
    if not hasattr(run, "long_batches"):
        run.long_batches = itertools.chain.from_iterable(itertools.repeat(run.long))  # type: ignore[attr-defined]
    for batch in run.short:
        yield batch, next(run.long_batches)  # type: ignore[attr-defined]


PROGRAMS: Final = (
    zip_short_first,
    zip_long_first,
    next_beside,
    next_now_and_then,
    next_over_epochs,
)


@pytest.mark.parametrize(
    "drop_last", [False, pytest.param(True, marks=pytest.mark.exhaustive)]
)
@pytest.mark.parametrize("pairs", PROGRAMS, ids=lambda pairs: pairs.__name__)
def test_two_loaders_resume_as_if_never_stopped(
    tmp_path: Path, pairs: Pairs, drop_last: bool
) -> None:
    complete = Run(tmp_path / "complete", drop_last=drop_last)
    complete.train(pairs)
    for stop_at in range(1, len(complete.points) + 1):
        folder = tmp_path / f"stopped-{stop_at}"
        stopped = Run(folder, stop_at, drop_last=drop_last)
        with pytest.raises(Stopped):
            stopped.train(pairs)
        resumed = Run(folder, drop_last=drop_last)
        resumed.accelerator.load_state()
        resumed.train(pairs)
        expected = complete.points[stop_at:]
        assert resumed.points == expected, f"stopped after {complete.points[:stop_at]}"
        assert torch.equal(resumed.model.weight, complete.model.weight)


@pytest.mark.parametrize(
    "pairs",
    [zip_short_first, zip_long_first, next_beside],
    ids=lambda pairs: pairs.__name__,
)
def test_two_loaders_resume_from_every_point_in_turn(
    tmp_path: Path, pairs: Pairs
) -> None:
    complete = Run(tmp_path / "complete")
    complete.train(pairs)
    points: list[Any] = []
    while len(points) < len(complete.points):
        run = Run(tmp_path / "run", stop_at=1)
        if points:
            run.accelerator.load_state()
        with pytest.raises(Stopped):
            run.train(pairs)
        points += run.points
    assert points == complete.points
