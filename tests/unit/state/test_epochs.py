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
        self.seen: list[Any] = []
        self._stop_at = stop_at

    def train(self, *what: Any) -> None:
        """One update, and a point behind it."""
        x = what[-1][0]
        self.accelerator.backward(self.model(x).square().mean())
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.point(*what[:-1], x.flatten().int().tolist())

    def point(self, *what: Any) -> None:
        """Note something done; save and stop here if it was asked for."""
        self.seen.append(what)
        if len(self.seen) == self._stop_at:
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
        for batch, (other,) in zip(run.loaders[1], run.loaders[0], strict=False):
            run.train("train", epoch, other.tolist(), batch)
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
    whole = Run(tmp_path / "whole")
    program(whole)
    for stop_at in range(1, len(whole.seen) + 1, every):
        stopped = Run(tmp_path / "stopped", stop_at)
        with pytest.raises(Stopped):
            program(stopped)
        resumed = Run(tmp_path / "stopped")
        resumed.accelerator.load_state()
        program(resumed)
        start = stop_at
        while whole.seen[start - 1][0] == "test":  # an evaluation begins anew
            start -= 1
        assert resumed.seen == whole.seen[start:], (
            f"stopped after {whole.seen[:stop_at]}"
        )
        assert torch.equal(resumed.model.weight, whole.model.weight)
        shutil.rmtree(tmp_path / "stopped")


def test_a_resumed_run_may_be_stopped_and_resumed_again(tmp_path: Path) -> None:
    whole = Run(tmp_path / "whole")
    with_a_short_evaluation(whole)
    seen: list[Any] = []
    while True:
        run = Run(tmp_path / "run", stop_at=1)
        if seen:
            run.accelerator.load_state()
        try:
            with_a_short_evaluation(run)
        except Stopped:
            seen += run.seen
            continue
        break
    assert seen == whole.seen


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
    assert run.seen == [("train", 0, order[0][0]), ("train", 1, order[1][0])]
    resumed = Run(tmp_path)
    resumed.accelerator.load_state()
    plain(resumed)
    rest = [("train", 1, one) for one in order[1][1:]] + [("end", 1)]
    assert resumed.seen == [*rest, *[("train", 2, one) for one in order[2]], ("end", 2)]


@pytest.mark.parametrize("before", [False, True])
def test_loops_of_ones_own_are_left_alone(tmp_path: Path, before: bool) -> None:
    def program(run: Run, passes: int) -> None:
        for number in range(passes):
            for batch in run.loaders[0]:
                run.train("train", number, batch)

    whole, stopped, resumed = (
        Run(tmp_path / name, stop)
        for name, stop in (("a", None), ("b", 8), ("b", None))
    )
    for run in (whole, stopped):
        # a loop that is over plays no part
        for _ in run.accelerator.epochs(2 if before else 0):
            for _ in run.loaders[0]:
                pass
    program(whole, 4)
    with pytest.raises(Stopped):
        program(stopped, 4)
    resumed.accelerator.load_state()
    program(resumed, 2)
    assert [what[-1] for what in resumed.seen] == [what[-1] for what in whole.seen[8:]]


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
    whole = Run(tmp_path / "whole")
    one_loader_after_the_other(whole)
    assert resumed.seen == whole.seen[4:]


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
    assert [what[1] for what in resumed.seen] == [1] * 4 + [2] * 4
    assert resumed.seen[0] == run.seen[1]


def test_an_epoch_that_set_epoch_ends_is_over(tmp_path: Path) -> None:
    def program(run: Run) -> None:
        for epoch in run.accelerator.epochs(3):
            for batch in run.loaders[0]:
                run.train("train", epoch, batch)
                break
            run.loaders[0].set_epoch(epoch + 1)
            run.point("end", epoch)

    whole = Run(tmp_path / "whole")
    program(whole)
    for stop_at in range(1, len(whole.seen) + 1):
        # the loader goes on inside that epoch
        if whole.seen[stop_at - 1][0] == "train":
            continue
        stopped = Run(tmp_path / str(stop_at), stop_at)
        with pytest.raises(Stopped):
            program(stopped)
        resumed = Run(tmp_path / str(stop_at))
        resumed.accelerator.load_state()
        program(resumed)
        assert resumed.seen == whole.seen[stop_at:]


def test_a_loop_in_the_same_process_goes_on_where_the_state_was_saved(
    tmp_path: Path,
) -> None:
    run = Run(tmp_path / "stopped", stop_at=6)
    with pytest.raises(Stopped):
        plain(run)
    whole = Run(tmp_path / "whole")
    plain(whole)
    for _ in range(2):
        run.accelerator.load_state(
            tmp_path / "stopped" / "checkpoints" / "checkpoint_0"
        )
        run.seen, run._stop_at = [], None
        plain(run)
        assert run.seen == whole.seen[6:]


def test_a_state_loaded_inside_a_loop_takes_it_back(tmp_path: Path) -> None:
    run = Run(tmp_path)
    seen = []
    for epoch in run.accelerator.epochs(4):
        seen.append(epoch)
        for batch in run.loaders[0]:
            run.train("train", epoch, batch)
            if len(run.seen) == 5:
                run.accelerator.save_state()
        if epoch == 3 and seen.count(3) == 1:
            run.accelerator.load_state()
    assert seen == [0, 1, 2, 3, 1, 2, 3]
    assert len(run.seen) == 12 + 1 + 6


def test_more_epochs_than_the_saved_run_had(tmp_path: Path) -> None:
    run = Run(tmp_path)
    plain(run)
    run.accelerator.save_state()
    resumed = Run(tmp_path)
    resumed.accelerator.load_state()
    assert list(resumed.accelerator.epochs(5)) == [3, 4]
    again = Run(tmp_path)
    again.accelerator.load_state()
    assert list(again.accelerator.epochs(3)) == []


class Counted(IterableDataset[int]):
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
        return accelerator, accelerator.prepare(DataLoader(Counted(), batch_size=4))

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
