"""The length of schedules: found in torch's and transformers' schedulers, and compared with whole epochs of a loader."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import pytest
import torch
from torch.optim import lr_scheduler as torch_schedules
from torch.optim.lr_scheduler import LambdaLR

from hasten.optim.scheduler import LoopLength, explain_wrong_length, schedule_length
from hasten.optional import need

transformers = need("transformers")


def sgd() -> torch.optim.SGD:
    return torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)


def warmup_schedule(optimizer: torch.optim.Optimizer) -> torch_schedules.SequentialLR:
    phases = [
        torch_schedules.LinearLR(optimizer, 0.1, 1.0, 4),
        torch_schedules.CosineAnnealingLR(optimizer, 36),
    ]
    return torch_schedules.SequentialLR(optimizer, phases, [4])


SCHEDULES: Final[dict[str, tuple[Callable[[Any], Any], int | None]]] = {
    "OneCycleLR": (
        lambda o: torch_schedules.OneCycleLR(o, 0.1, steps_per_epoch=20, epochs=2),
        40,
    ),
    "CosineAnnealingLR": (lambda o: torch_schedules.CosineAnnealingLR(o, 40), 40),
    "PolynomialLR": (lambda o: torch_schedules.PolynomialLR(o, 40), 40),
    "LinearLR": (lambda o: torch_schedules.LinearLR(o, 1.0, 0.0, total_iters=40), 40),
    "LinearLR that warms up": (
        lambda o: torch_schedules.LinearLR(o, 0.1, 1.0, total_iters=40),
        None,
    ),
    "SequentialLR": (warmup_schedule, 40),
    "linear of transformers": (
        lambda o: transformers.get_linear_schedule_with_warmup(o, 5, 40),
        40,
    ),
    "cosine of transformers": (
        lambda o: transformers.get_cosine_schedule_with_warmup(o, 5, 40),
        40,
    ),
    "StepLR": (lambda o: torch_schedules.StepLR(o, 40), None),
    "LambdaLR": (lambda o: LambdaLR(o, lambda step: 1.0), None),
    "ReduceLROnPlateau": (torch_schedules.ReduceLROnPlateau, None),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_length_is_found(name: str) -> None:
    make, total = SCHEDULES[name]
    assert schedule_length(make(sgd())) == total


def test_whole_epochs_of_batches_are_reported() -> None:
    for every in (1, 2, 3, 4):
        for num_batches in range(2, 30):
            for epochs in range(1, 5):
                for total in {num_batches * epochs, num_batches * epochs // every or 1}:
                    length = LoopLength(num_batches, -(-num_batches // 2), 2, every)
                    explanation = explain_wrong_length(
                        torch_schedules.CosineAnnealingLR(sgd(), total), length
                    )
                    is_right = any(
                        total == length.num_updates(number) for number in range(1, 5)
                    )
                    is_near = (
                        total < 1.5 * length.num_updates(epochs)
                        and length.num_updates(epochs) < 1.5 * total
                    )
                    assert explanation is not None or is_right or is_near, (
                        every,
                        num_batches,
                        epochs,
                    )


def test_updates_of_one_process_are_reported_however_short_windows_are_counted() -> (
    None
):
    two_processes = LoopLength(11, 6, 2, 2)
    for updates_an_epoch in (11 // 2, -(-11 // 2)):
        schedule = torch_schedules.CosineAnnealingLR(sgd(), updates_an_epoch * 2)
        message = explain_wrong_length(schedule, two_processes) or ""
        assert "2 epoch(s) of a loader of 11 batches" in message


def test_right_lengths_are_not() -> None:
    schedule = torch_schedules.CosineAnnealingLR(sgd(), 30)
    assert explain_wrong_length(schedule, LoopLength(20, 10, 2, 1)) is None, (
        "three epochs of the divided loader"
    )
    assert explain_wrong_length(schedule, LoopLength(10, 10, 2, 1)) is None, (
        "split_batches: as many batches as before"
    )
    assert explain_wrong_length(schedule, LoopLength(10, 10, 1, 1)) is None, (
        "one process"
    )
    eight_steps = torch_schedules.CosineAnnealingLR(sgd(), 8)
    assert explain_wrong_length(eight_steps, LoopLength(5, 5, 1, 2)) is None, (
        "three epochs but for their short windows"
    )
    assert (
        explain_wrong_length(
            torch_schedules.StepLR(sgd(), 20), LoopLength(20, 10, 2, 1)
        )
        is None
    ), "no end"


def test_an_open_window_goes_over_the_end_of_an_epoch() -> None:
    assert LoopLength(5, 5, 1, 2).num_updates(3) == 9
    assert LoopLength(5, 5, 1, 2, ends_with_epoch=False).num_updates(3) == 7
