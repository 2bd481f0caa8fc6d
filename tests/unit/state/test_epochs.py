"""Epoch loops: whatever point a run is saved at and resumed from, its loops go on as if it had never stopped."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from hasten import Accelerator, DataLoaderConfiguration
from hasten.errors import ArgumentError, StepError


class Stopped(Exception):
    """The process ended here."""


class Run:
    """A run that notes what it does; it saves and stops at one of its points."""

    def __init__(
        self, folder: Path, stop_at: int | None = None, **settings: Any
    ) -> None:
        torch.manual_seed(0)
        self.accelerator = Accelerator(cpu=True, project_dir=str(folder), **settings)
        model = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        loaders = [
            DataLoader(
                TensorDataset(torch.arange(float(n)).reshape(-1, 1)),
                batch_size=2,
                shuffle=shuffle,
            )
            for n, shuffle in ((6, True), (4, True), (4, False))
        ]
        self.model, self.optimizer, *self.loaders = self.accelerator.prepare(
            model, optimizer, *loaders
        )
        self.points: list[Any] = []
        self._stop_at = stop_at

    def train(self, *point: Any) -> None:
        """One update, and a point behind it."""
        x = point[-1][0]
        self.accelerator.backward(self.model(x).square().mean())
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.point(*point[:-1], x.flatten().int().tolist())

    def point(self, *point: Any) -> None:
        """Note something done; save and stop here if it was asked for."""
        self.points.append(point)
        if len(self.points) == self._stop_at:
            self.accelerator.save_state()
            raise Stopped


def plain(run: Run) -> None:
    for epoch in run.accelerator.epochs(3):
        for batch in run.loaders[0]:
            run.train("train", epoch, batch)
        run.point("end", epoch)


def with_set_epoch(run: Run) -> None:
    for epoch in run.accelerator.epochs(3):
        run.loaders[0].set_epoch(epoch)
        for batch in run.accelerator.progress(run.loaders[0]):
            run.train("train", epoch, batch)
        run.point("end", epoch)


def with_evaluation(run: Run) -> None:
    train, _, test = run.loaders
    for epoch in run.accelerator.epochs(3):
        for batch in train:
            run.train("train", epoch, batch)
        for (x,) in test:
            run.point("test", epoch, x.flatten().int().tolist())
        run.point("end", epoch)


def with_evaluation_inside(run: Run) -> None:
    train, _, test = run.loaders
    for epoch in run.accelerator.epochs(2):
        for batch in train:
            sizes = [len(x) for (x,) in test]
            run.train("train", epoch, sizes, batch)
        run.point("end", epoch)


def with_a_short_evaluation(run: Run) -> None:
    train, _, test = run.loaders
    for epoch in run.accelerator.epochs(2):
        for batch in train:
            run.train("train", epoch, batch)
        for _ in test:
            break
        run.point("end", epoch)


def one_loader_after_the_other(run: Run) -> None:
    for epoch in run.accelerator.epochs(3):
        for number, loader in enumerate(run.loaders[:2]):
            for batch in loader:
                run.train("train", number, epoch, batch)
        for batch in run.loaders[0]:
            run.train("again", epoch, batch)
        run.point("end", epoch)


def side_by_side(run: Run) -> None:
    for epoch in run.accelerator.epochs(3):
        for batch, (companion,) in zip(run.loaders[1], run.loaders[0], strict=False):
            run.train("train", epoch, companion.tolist(), batch)
        run.point("end", epoch)


def two_loops(run: Run) -> None:
    for phase in range(2):
        for epoch in run.accelerator.epochs(2):
            for batch in run.loaders[phase]:
                run.train("train", phase, epoch, batch)
            run.point("end", phase, epoch)


def without_prepared_loaders(run: Run) -> None:
    for epoch in run.accelerator.epochs(3):
        run.train("train", epoch, (torch.ones(1, 1),))


PROGRAMS: Final = (
    plain,
    with_set_epoch,
    with_evaluation,
    with_evaluation_inside,
    with_a_short_evaluation,
    one_loader_after_the_other,
    side_by_side,
    two_loops,
    without_prepared_loaders,
)


@pytest.mark.parametrize("every", [3, pytest.param(1, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_a_run_that_is_stopped_anywhere_goes_on_as_if_it_never_was(
    tmp_path: Path, program: Callable[[Run], None], every: int
) -> None:
    uninterrupted = Run(tmp_path / "whole")
    program(uninterrupted)
    for stop_at in range(1, len(uninterrupted.points) + 1, every):
        stopped = Run(tmp_path / "stopped", stop_at)
        with pytest.raises(Stopped):
            program(stopped)
        resumed = Run(tmp_path / "stopped")
        resumed.accelerator.load_state()
        program(resumed)
        start = stop_at
        while uninterrupted.points[start - 1][0] == "test":  # an evaluation begins anew
            start -= 1
        assert resumed.points == uninterrupted.points[start:], (
            f"stopped after {uninterrupted.points[:stop_at]}"
        )
        assert torch.equal(resumed.model.weight, uninterrupted.model.weight)
        shutil.rmtree(tmp_path / "stopped")


def test_a_resumed_run_may_be_stopped_and_resumed_again(tmp_path: Path) -> None:
    uninterrupted = Run(tmp_path / "whole")
    with_a_short_evaluation(uninterrupted)
    points: list[Any] = []
    while True:
        run = Run(tmp_path / "run", stop_at=1)
        if points:
            run.accelerator.load_state()
        try:
            with_a_short_evaluation(run)
        except Stopped:
            points += run.points
            continue
        break
    assert points == uninterrupted.points


def test_a_pass_left_by_break_is_gone_on_with_only_after_a_resume(
    tmp_path: Path,
) -> None:
    run = Run(tmp_path)
    (train, *_) = run.loaders
    order = {
        epoch: [x.flatten().int().tolist() for (x,) in train] for epoch in range(3)
    }
    train.set_epoch(0)
    for epoch in run.accelerator.epochs(3):
        for batch in train:
            run.train("train", epoch, batch)
            break
        if epoch == 1:
            run.accelerator.save_state()
            break
    assert run.points == [("train", 0, order[0][0]), ("train", 1, order[1][0])]
    resumed = Run(tmp_path)
    resumed.accelerator.load_state()
    plain(resumed)
    remaining_points = [
        ("train", 1, batch_numbers) for batch_numbers in order[1][1:]
    ] + [("end", 1)]
    assert resumed.points == [
        *remaining_points,
        *[("train", 2, batch_numbers) for batch_numbers in order[2]],
        ("end", 2),
    ]


@pytest.mark.parametrize("has_earlier_loop", [False, True])
def test_loops_of_ones_own_are_left_alone(
    tmp_path: Path, has_earlier_loop: bool
) -> None:
    def program(run: Run, passes: int) -> None:
        for number in range(passes):
            for batch in run.loaders[0]:
                run.train("train", number, batch)

    uninterrupted, stopped, resumed = (
        Run(tmp_path / name, stop)
        for name, stop in (("a", None), ("b", 8), ("b", None))
    )
    for run in (uninterrupted, stopped):
        # a loop that is over plays no part
        for _ in run.accelerator.epochs(2 if has_earlier_loop else 0):
            for _ in run.loaders[0]:
                pass
    program(uninterrupted, 4)
    with pytest.raises(Stopped):
        program(stopped, 4)
    resumed.accelerator.load_state()
    program(resumed, 2)
    assert [point[-1] for point in resumed.points] == [
        point[-1] for point in uninterrupted.points[8:]
    ]


def test_passes_that_are_over_stay_so_behind_the_loop(tmp_path: Path) -> None:
    run = Run(tmp_path)
    for epoch in run.accelerator.epochs(3):
        for batch in run.loaders[0]:
            run.train("first", epoch, batch)
        for batch in run.loaders[1]:
            run.train("second", epoch, batch)
            break
        break
    run.accelerator.save_state()
    resumed = Run(tmp_path)
    resumed.accelerator.load_state()
    one_loader_after_the_other(resumed)
    uninterrupted = Run(tmp_path / "whole")
    one_loader_after_the_other(uninterrupted)
    assert resumed.points == uninterrupted.points[4:]


def test_a_state_saved_before_the_first_batch_of_an_epoch_begins_it_again(
    tmp_path: Path,
) -> None:
    run = Run(tmp_path)
    for epoch in run.accelerator.epochs(3):
        if epoch == 1:
            run.accelerator.save_state()
        for batch in run.loaders[0]:
            run.train("train", epoch, batch)
            break  # over when the next epoch begins
    resumed = Run(tmp_path)
    resumed.accelerator.load_state()
    plain(resumed)
    assert [point[1] for point in resumed.points] == [1] * 4 + [2] * 4
    assert resumed.points[0] == run.points[1]


def test_an_epoch_that_set_epoch_ends_is_over(tmp_path: Path) -> None:
    def program(run: Run) -> None:
        for epoch in run.accelerator.epochs(3):
            for batch in run.loaders[0]:
                run.train("train", epoch, batch)
                break
            run.loaders[0].set_epoch(epoch + 1)
            run.point("end", epoch)

    uninterrupted = Run(tmp_path / "whole")
    program(uninterrupted)
    for stop_at in range(1, len(uninterrupted.points) + 1):
        # the loader goes on inside that epoch
        if uninterrupted.points[stop_at - 1][0] == "train":
            continue
        stopped = Run(tmp_path / str(stop_at), stop_at)
        with pytest.raises(Stopped):
            program(stopped)
        resumed = Run(tmp_path / str(stop_at))
        resumed.accelerator.load_state()
        program(resumed)
        assert resumed.points == uninterrupted.points[stop_at:]


def test_a_loop_in_the_same_process_goes_on_where_the_state_was_saved(
    tmp_path: Path,
) -> None:
    run = Run(tmp_path / "stopped", stop_at=6)
    with pytest.raises(Stopped):
        plain(run)
    uninterrupted = Run(tmp_path / "whole")
    plain(uninterrupted)
    for _ in range(2):
        run.accelerator.load_state(
            tmp_path / "stopped" / "checkpoints" / "checkpoint_0"
        )
        run.points, run._stop_at = [], None
        plain(run)
        assert run.points == uninterrupted.points[6:]


def test_a_state_loaded_inside_a_loop_takes_it_back(tmp_path: Path) -> None:
    run = Run(tmp_path)
    visited_epochs = []
    for epoch in run.accelerator.epochs(4):
        visited_epochs.append(epoch)
        for batch in run.loaders[0]:
            run.train("train", epoch, batch)
            if len(run.points) == 5:
                run.accelerator.save_state()
        if epoch == 3 and visited_epochs.count(3) == 1:
            run.accelerator.load_state()
    assert visited_epochs == [0, 1, 2, 3, 1, 2, 3]
    assert len(run.points) == 12 + 1 + 6


def test_more_epochs_than_the_saved_run_had(tmp_path: Path) -> None:
    run = Run(tmp_path)
    plain(run)
    run.accelerator.save_state()
    resumed = Run(tmp_path)
    resumed.accelerator.load_state()
    assert list(resumed.accelerator.epochs(5)) == [3, 4]
    finished = Run(tmp_path)
    finished.accelerator.load_state()
    assert list(finished.accelerator.epochs(3)) == []


class CountedStream(IterableDataset[int]):
    """Numbers from a stream without a length."""

    def __iter__(self) -> Any:
        return iter(range(10))


@pytest.mark.parametrize("dispatch", [False, True])
def test_streams(tmp_path: Path, dispatch: bool) -> None:
    def prepared() -> tuple[Accelerator, Any]:
        data = DataLoaderConfiguration(dispatch_batches=dispatch)
        accelerator = Accelerator(
            cpu=True, project_dir=str(tmp_path), dataloader_config=data
        )
        return accelerator, accelerator.prepare(
            DataLoader(CountedStream(), batch_size=4)
        )

    accelerator, loader = prepared()
    for epoch in accelerator.epochs(3):
        for number, _ in enumerate(loader):
            if (epoch, number) == (1, 1):
                accelerator.save_state()
    accelerator, loader = prepared()
    accelerator.load_state()
    assert loader.num_done == 2
    assert [(epoch, x.tolist()) for epoch in accelerator.epochs(3) for x in loader] == [
        (1, [8, 9]),
        *[(2, x) for x in ([0, 1, 2, 3], [4, 5, 6, 7], [8, 9])],
    ]


@pytest.mark.parametrize("wrong", [-1, 2.5, "3", True, None])
def test_only_whole_numbers_of_epochs(wrong: Any) -> None:
    with pytest.raises(ArgumentError, match=r"epochs\(num_epochs\) got .*whole number"):
        Accelerator(cpu=True).epochs(wrong)


def test_loops_inside_each_other_are_refused(tmp_path: Path) -> None:
    accelerator = Run(tmp_path).accelerator
    for _ in accelerator.epochs(2):
        with pytest.raises(StepError, match=r"Use range\(\)"):
            next(accelerator.epochs(2))
    assert list(accelerator.epochs(2)) == [0, 1]
